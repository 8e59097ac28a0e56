"""The draft model: a smaller policy of any family with the same tokenizer, run over the engine's rows.

It keeps keys and values in a cache of its own under the pool's block numbers. While it proposes it stays at
most one token behind, because of what it proposed the last token is never run; so its first pass takes the
row's last two tokens. So it does behind a tree: what it ran of the tree's path moves to where it belongs, and
only the path's last node may be missing. For rows that ran without it, it catches up by a batched prefill,
which counts as a cost of the switch.
"""

from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer

from paceline.config import SpeculationConfig
from paceline.drafting.base import DrafterContext, TreeStep
from paceline.drafting.cached import CachedDrafter
from paceline.drafting.growth import GapCalibration, TreeGrowth, TreeShape
from paceline.drafting.logits import DraftLogits
from paceline.drafting.recipe import draft_model_folder
from paceline.drafting.sampling import sample_draft
from paceline.drafting.tree import TreeProposals
from paceline.kernels.draft_step import DraftQueries, gather_draft
from paceline.paged.cache import BLOCK_SIZE, KVCache, token_bytes
from paceline.paged.forward import PagedForward
from paceline.policy.config import read_config
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy
from paceline.types import Request

# Tokens per forward pass when catching up.
CATCH_UP_TOKENS = 16384


@dataclass(frozen=True)
class _Chunk:
    """Positions [first, end) of a line of the tables."""

    line: int
    first: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.first


class DraftModel(CachedDrafter):
    """A smaller policy with the same tokenizer as a drafter."""

    name = "draft_model"
    max_tokens = 15
    calibration: GapCalibration
    needs_catch_up = True

    def __init__(self, policy: Decoder) -> None:
        self.policy = policy
        config = self.shape = policy.config
        self.token_bytes = token_bytes(config.num_layers, config.num_kv_heads, config.head_dim, policy.dtype)

    @classmethod
    def of_recipe(
        cls, settings: SpeculationConfig, policy: Decoder, tokenizer: Tokenizer | None
    ) -> "DraftModel":
        folder = draft_model_folder(settings, policy.config, tokenizer)
        if policy.device.type == "meta":
            return cls(Decoder(read_config(folder), policy.dtype, policy.device))
        return cls(load_policy(folder, policy.dtype, policy.device))

    def bind(self, context: DrafterContext) -> None:
        self.context = context
        if self.policy.config.vocab_size != context.policy.config.vocab_size:
            sizes = (
                f"{self.policy.config.vocab_size} tokens and the policy {context.policy.config.vocab_size}"
            )
            raise ValueError(f"the draft model has {sizes}; they must share a tokenizer")
        self.cache = KVCache(self.policy.config, context.num_blocks, self.policy.dtype, self.policy.device)
        self.forward = PagedForward(self.policy, self.cache, context.deterministic)
        # Leading tokens of each row that are in the cache.
        self.cached_S = torch.zeros_like(context.rows.length)
        self.calibration = GapCalibration(self.policy.device)
        self.trees = TreeProposals(context, self.calibration)
        # Of the nodes proposed last: where their keys lie in the cache, behind the row's last token; -1: they
        # were not run.
        self.places_SK = torch.full_like(context.proposals_SK, -1)

    def observe_enter(self, slot: int, request: Request, handover: torch.Tensor | None) -> None:
        self.cached_S[slot] = 0

    def catch_up(self, slots: list[int], lengths: list[int]) -> None:
        """Prefills the rows' tokens that are missing from the cache."""
        rows = self.context.rows
        device = self.policy.device
        index = torch.tensor(slots, device=device)
        tables = rows.block_table[index].cpu().numpy()
        tokens = rows.tokens[index, : max(lengths)].cpu().numpy()
        chunks = _missing_chunks(tables, self.cached_S[index].tolist(), lengths)
        while chunks:
            batch = [chunks.pop(0)]
            while chunks and sum(chunk.size for chunk in [*batch, chunks[0]]) <= CATCH_UP_TOKENS:
                batch.append(chunks.pop(0))
            self._prefill(batch, tokens, tables)
        self.cached_S[index] = torch.tensor(lengths, device=device)

    def _prefill(self, chunks: list[_Chunk], tokens: np.ndarray, tables: np.ndarray) -> None:
        lines = np.array([chunk.line for chunk in chunks])
        positions = np.concatenate([np.arange(chunk.first, chunk.end) for chunk in chunks])
        owner = np.concatenate([np.full(chunk.size, chunk.line) for chunk in chunks])
        cache_slots = (
            tables[owner, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        )
        boundaries = np.cumsum([0, *(chunk.size for chunk in chunks)])
        contexts = np.array([chunk.first for chunk in chunks])
        # A draft model may end before the policy does.
        known = np.minimum(positions, self.forward.max_position)
        arrays = tokens[owner, positions], known, cache_slots, tables[lines], boundaries, contexts
        self.forward.prefill(*(torch.from_numpy(array).to(self.policy.device) for array in arrays))

    def propose(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        rows = self.context.rows
        walk = gather_draft(rows, slots_R, count + 1, self.forward.max_position, BLOCK_SIZE)
        table_RB = rows.block_table.index_select(0, slots_R)
        hidden_RE = self._run_last_two(walk, table_RB)
        proposed: list[torch.Tensor] = []
        for column in range(count):
            if column > 0:
                hidden_RE, _ = self.forward.decode(
                    proposed[-1].unsqueeze(1),
                    walk.positions_CR[column + 1].unsqueeze(1),
                    walk.cache_slots_CR[column + 1].unsqueeze(1),
                    table_RB,
                    walk.context_CR[column + 1],
                )
            logits = DraftLogits(self.forward.logits(hidden_RE))
            proposed.append(sample_draft(logits, self.context, slots_R, walk, column, truncates))
        self.context.proposals_SK[slots_R, :count] = torch.stack(proposed, dim=1)
        # All accepted, the next length is L + count + 1, and what was not run here is one token behind it.
        self.cached_S[slots_R] = rows.length[slots_R]

    def propose_tree(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        rows = self.context.rows
        shape = TreeShape.of(count)
        # Column 1 is the root's.
        walk = gather_draft(rows, slots_R, 1 + shape.places, self.forward.max_position, BLOCK_SIZE)
        table_RB = rows.block_table.index_select(0, slots_R)
        growth = TreeGrowth(shape, self.context, slots_R, walk, self.calibration, truncates, root_column=1)
        nodes = growth.branch(DraftLogits(self.forward.logits(self._run_last_two(walk, table_RB))))
        while nodes is not None:
            places = nodes.positions_RW, nodes.cache_slots_RW, table_RB, walk.context_CR[1]
            hidden_TE, _ = self.forward.decode(nodes.tokens_RW, *places, nodes.keys)
            nodes = growth.branch(DraftLogits(self.forward.logits(hidden_TE)))
        chosen_RK = self.trees.propose(slots_R, growth.candidates(), count)
        self.places_SK[slots_R, :count] = growth.places_RN().gather(1, chosen_RK)
        self.cached_S[slots_R] = rows.length[slots_R]

    def observe_tree(self, step: TreeStep) -> None:
        self.trees.observe(step)
        # By node, the root first. A path's last node may not have been run; all before it were, but near the
        # row's limit some had no place in the cache to be kept in.
        place_RQ = torch.zeros_like(step.walk.path_RQ)
        place_RQ[:, 1:] = self.places_SK[step.slots_R, : place_RQ.shape[1] - 1]
        place_RQ = place_RQ.gather(1, step.walk.path_RQ)
        sources_RQ = step.queries.cache_slots_RQ.gather(1, place_RQ.clamp(min=0))
        self.cache.move_slots(torch.where(place_RQ < 0, -1, sources_RQ), step.walk.targets_RQ)

    def _run_last_two(self, walk: DraftQueries, table_RB: torch.Tensor) -> torch.Tensor:
        """Runs the rows' last two tokens and returns the last one's hidden states, `[R, E]`."""
        # A row of one token has none before it, so nothing of it attends here; what catching up stored of it
        # is right and stays.
        slots_2R = torch.where(walk.context_CR[0] < 0, -1, walk.cache_slots_CR[:2])
        first_two = walk.tokens_2R.T, walk.positions_CR[:2].T, slots_2R.T
        hidden_TE, _ = self.forward.decode(*(x.contiguous() for x in first_two), table_RB, walk.context_CR[0])
        return hidden_TE.unflatten(0, (-1, 2))[:, 1].contiguous()


def _missing_chunks(tables: np.ndarray, cached: list[int], lengths: list[int]) -> list[_Chunk]:
    """Returns what is missing in the cache of each line, whose first `cached` tokens it has.

    Siblings share the blocks of their prompt, so what one of them fills is filled for all.
    """
    chunks: list[_Chunk] = []
    filled: set[int] = set()
    for line, (start, length) in enumerate(zip(cached, lengths, strict=True)):
        while start < length and int(tables[line, start // BLOCK_SIZE]) in filled:
            start = (start // BLOCK_SIZE + 1) * BLOCK_SIZE
        filled |= {int(tables[line, block]) for block in range(start // BLOCK_SIZE, length // BLOCK_SIZE)}
        chunks += [
            _Chunk(line, first, min(first + CATCH_UP_TOKENS, length))
            for first in range(start, length, CATCH_UP_TOKENS)
        ]
    return chunks
