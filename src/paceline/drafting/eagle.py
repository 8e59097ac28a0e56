"""The eagle drafter: an EAGLE-3 head (`eagle_head.py`) run over the engine's rows.

Its one layer keeps keys and values in a cache of its own under the pool's block numbers: the entry of token t
holds the policy's features there and the embedding of token t + 1, so it exists once that token is known.
Prefills and steps of every strategy write it, which costs one projection, so speculation can begin at any
moment without running the policy again (on a CPU steps wait until it does: `backlog.py`):

    tokens            a    b    c    d         d is the row's last token, not yet run by the policy
    entries          g_a  g_b  g_c             each with the embedding of the token to its right
    first proposal             q_c             attends to all entries; the features g_c wait in `features_SE`
    next ones                       x  x       the head's own states in place of features; overwritten later

A tree grows the same way, several nodes at a time, each of which attends to the entries on its own path.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer

from paceline.config import FRESH, SpeculationConfig
from paceline.drafting.backlog import StepBacklog
from paceline.drafting.base import DrafterContext, TargetPrefill, TargetStep, TreeStep
from paceline.drafting.cached import CachedDrafter
from paceline.drafting.eagle_folder import head_for, load_eagle
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.growth import GapCalibration, TreeGrowth, TreeShape, depth_that_pays
from paceline.drafting.head_products import HeadProducts
from paceline.drafting.logits import DraftLogits
from paceline.drafting.model_card import read_acceptance
from paceline.drafting.recipe import eagle_head
from paceline.drafting.recorder import RecorderShape, StateRecorder
from paceline.drafting.sampling import sample_draft
from paceline.drafting.tree import TreeProposals
from paceline.kernels.draft_step import gather_draft
from paceline.kernels.eagle_step import eagle_inputs, eagle_inputs_quantised, keep_last
from paceline.kernels.fp8_format import QuantisedRows
from paceline.kernels.norm import rms_norm_residual, rms_norm_residual_quantised
from paceline.kernels.paged_attention import paged_attention, paged_attention_quantised
from paceline.kernels.rope_kv import rope_and_write_kv
from paceline.kernels.row_step import TreeKeys
from paceline.kernels.swiglu import silu_multiply, silu_multiply_quantised
from paceline.paged.cache import BLOCK_SIZE, KVCache
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.states import StateRecording, TextStates
from paceline.types import Request


class EagleDrafter(CachedDrafter, StateRecording):
    """An EAGLE-3 head as a drafter, following the policy's hidden states."""

    name = "eagle"
    max_tokens = 15
    calibration: GapCalibration
    recorder: StateRecorder | None = None
    # Steps that wait until the head is to propose; None: none does.
    backlog: StepBacklog | None = None

    def __init__(self, head: EagleHead, deepest: int = TreeShape.DEEPEST, fp8: bool = False) -> None:
        """`deepest`: the maximum depth of the head's trees; `fp8`: whether it proposes in FP8."""
        self.head = head
        self.deepest = deepest
        self.fp8 = fp8
        layer = self.shape = head.config.layer
        self.captured_layers = head.config.captured_layers
        self.token_bytes = 2 * layer.num_kv_heads * layer.head_dim * head.fc.weight.dtype.itemsize
        # Where its steps wait in a backlog.
        self.needs_catch_up = head.fc.weight.device.type == "cpu"

    @classmethod
    def exists_for(cls, settings: SpeculationConfig, policy: DecoderConfig) -> bool:
        """No head is shipped for most policies; completions are the same without it."""
        return head_for(settings.eagle_path, policy) is not None

    @classmethod
    def of_recipe(
        cls, settings: SpeculationConfig, policy: Decoder, tokenizer: Tokenizer | None
    ) -> "EagleDrafter":
        path, config = eagle_head(settings, policy.config)
        fp8 = settings.eagle_precision == "fp8"
        if policy.device.type == "meta":
            return cls(EagleHead(config, policy.dtype, policy.device), fp8=fp8)
        if path == FRESH:
            return cls(EagleHead(config, policy.dtype, policy.device).initialise(policy, seed=0), fp8=fp8)
        head = load_eagle(path, policy, policy.dtype, policy.device)
        measured = read_acceptance(Path(path))
        deepest = depth_that_pays(measured.accepted_at) if measured is not None else TreeShape.DEEPEST
        return cls(head, deepest, fp8)

    def bind(self, context: DrafterContext) -> None:
        self.context = context
        layer = self.head.config.layer
        device = context.policy.device
        dtype = context.policy.dtype
        self.head.config.check_against(context.policy.config)
        self.cache = KVCache(layer, context.num_blocks, dtype, device)
        self.cos_PC, self.sin_PC = (self.head.rope_table[:, i].contiguous() for i in (0, 1))
        self.max_position = len(self.cos_PC) - 1
        self.features_SE = torch.zeros(
            len(context.rows.length), layer.hidden_size, dtype=dtype, device=device
        )
        self.products = HeadProducts(self.head, self.fp8, context.deterministic)
        self.calibration = GapCalibration(device)
        self.trees = TreeProposals(context, self.calibration)
        self.backlog = StepBacklog(self.captured_layers) if self.needs_catch_up else None
        self.whole_vocabulary = self.head.config.draft_vocab == layer.vocab_size

    # -- following the policy --

    def observe_prefill(self, prefill: TargetPrefill) -> Iterable[torch.Tensor]:
        """Returns each chunk's last features and, where states are recorded, all of its captured states."""
        features_TE = self._features(prefill.captured)
        self._write_entries(features_TE, prefill.following_T, prefill.positions_T, prefill.cache_slots_T)
        last_SE = features_TE[prefill.last_S]
        if self.recorder is None:
            return last_SE
        chunks = zip((0, *prefill.stops), prefill.stops, strict=False)
        captured = [prefill.captured[layer] for layer in self.captured_layers]
        return [
            torch.cat((features_E, *(states_TE[start:stop].flatten() for states_TE in captured)))
            for features_E, (start, stop) in zip(last_SE, chunks, strict=True)
        ]

    def observe_enter(self, slot: int, request: Request, handover: torch.Tensor | None) -> None:
        if self.backlog is not None:
            self.backlog.enter(slot)
        # None: a prompt of one token, or nothing was left to prefill; one poor proposal follows.
        if handover is None:
            return
        size = self.features_SE.shape[1]
        self.features_SE[slot] = handover[:size]
        if self.recorder is not None:
            self.recorder.enter(slot, request, handover[size:].view(len(self.captured_layers), -1, size))

    def observe_leave(self, slot: int, request: Request, length: int, finished: bool) -> None:
        if self.backlog is not None:
            if request.hold:
                # Its blocks stay, and so must what the head has there.
                self._look_at_backlog()
            self.backlog.leave(slot)
        if self.recorder is not None and slot in self.recorder.row_of:
            self.recorder.leave(slot, request, self.context.rows.tokens[slot, :length], finished)

    def observe_step(self, step: TargetStep) -> None:
        if self.recorder is not None:
            self.recorder.step(step)
        if self.backlog is not None and step.way_RQ is None:
            self.backlog.add(step, self.context.rows.length)
            if self.backlog.is_full:
                self._look_at_backlog()
        else:
            self._look_at_backlog()
            self._look_at(step)

    def _look_at(self, step: TargetStep) -> None:
        features_TE = self._features(step.captured)
        # Entries behind a sample that was not kept are wrong, and are written again before anything attends
        # to them.
        self._write_entries(features_TE, step.sampled_T, step.positions_T, step.cache_slots_T)
        rows = step.slots_R, step.context_R, self.context.rows.length
        keep_last(features_TE, *rows, self.features_SE, step.way_RQ)

    def catch_up(self, slots: list[int], lengths: list[int]) -> None:
        self._look_at_backlog()

    @torch.inference_mode()
    def _look_at_backlog(self) -> None:
        kept = self.backlog.take() if self.backlog is not None else None
        if kept is not None:
            features_TE = self._features(kept.captured)
            self._write_entries(features_TE, kept.following_T, kept.positions_T, kept.cache_slots_T)
            self.features_SE[kept.slots_R] = features_TE[kept.last_R]

    def _features(self, captured: dict[int, torch.Tensor]) -> torch.Tensor:
        return self.products(
            torch.cat([captured[i] for i in self.captured_layers], dim=-1), self.head.fc.weight
        )

    def _write_entries(
        self,
        features_TE: torch.Tensor,
        following_T: torch.Tensor,
        positions_T: torch.Tensor,
        cache_slots_T: torch.Tensor,
    ) -> None:
        attention = self.head.attention
        queries = attention.heads * attention.head_dim
        kv = self.products(self._inputs(features_TE, following_T), attention.qkv.weight[queries:])
        rope_and_write_kv(kv, positions_T, cache_slots_T, self.cos_PC, self.sin_PC, *self.cache.layer(0), 0)

    # -- proposing --

    def propose(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        self._look_at_backlog()
        rows = self.context.rows
        walk = gather_draft(rows, slots_R, count, self.max_position, BLOCK_SIZE)
        table_RB = rows.block_table.index_select(0, slots_R)
        states_RE = self.features_SE.index_select(0, slots_R)
        tokens_R = walk.tokens_2R[1]
        proposed = []
        for column in range(count):
            place = walk.positions_CR[column], walk.cache_slots_CR[column], walk.context_CR[column]
            normed_RE, states_RE = self._layer(states_RE, tokens_R, *place, table_RB)
            tokens_R = sample_draft(self._logits(normed_RE), self.context, slots_R, walk, column, truncates)
            proposed.append(tokens_R)
        self.context.proposals_SK[slots_R, :count] = torch.stack(proposed, dim=1)

    def propose_tree(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        self._look_at_backlog()
        rows = self.context.rows
        shape = TreeShape.of(count, self.deepest)
        walk = gather_draft(rows, slots_R, shape.places, self.max_position, BLOCK_SIZE)
        table_RB = rows.block_table.index_select(0, slots_R)
        context_R = walk.context_CR[0]
        states_RE = self.features_SE.index_select(0, slots_R)
        first = walk.tokens_2R[1], walk.positions_CR[0], walk.cache_slots_CR[0]
        normed_TE, states_TE = self._layer(states_RE, *first, context_R, table_RB)
        growth = TreeGrowth(shape, self.context, slots_R, walk, self.calibration, truncates)
        nodes = growth.branch(self._logits(normed_TE))
        while nodes is not None:
            states_TE = states_TE.index_select(0, nodes.above_T)
            places = nodes.tokens_RW, nodes.positions_RW, nodes.cache_slots_RW
            run = *(x.flatten() for x in places), context_R, table_RB, nodes.keys
            normed_TE, states_TE = self._layer(states_TE, *run)
            nodes = growth.branch(self._logits(normed_TE))
        self.trees.propose(slots_R, growth.candidates(), count)

    def observe_tree(self, step: TreeStep) -> None:
        # The entries of the path come from the policy's features, by `observe_step`.
        self.trees.observe(step)

    def _layer(
        self,
        states_TE: torch.Tensor,
        following_T: torch.Tensor,
        positions_T: torch.Tensor,
        cache_slots_T: torch.Tensor,
        context_R: torch.Tensor,
        table_RB: torch.Tensor,
        tree: TreeKeys | None = None,
    ) -> tuple[torch.Tensor | QuantisedRows, torch.Tensor]:
        """(normed, state): what the vocabulary's head takes, and what the next column or depth does.

        There is one token for each row, or as many as its `tree` has nodes.
        """
        head = self.head
        attention = head.attention
        eps = head.config.layer.norm_eps
        k_cache, v_cache = self.cache.layer(0)
        products, feed_forward = self.products, head.feed_forward
        fp8 = self.fp8
        qkv = products(self._inputs(states_TE, following_T, fp8), attention.qkv.weight, in_parts=True)
        q_THD = rope_and_write_kv(
            qkv,
            positions_T,
            cache_slots_T,
            self.cos_PC,
            self.sin_PC,
            k_cache,
            v_cache,
            attention.heads,
            dtype=states_TE.dtype,
        )
        q_RQHD = q_THD.unflatten(0, (len(context_R), -1))
        cache = k_cache, v_cache, table_RB, context_R
        attended_TE = (
            paged_attention_quantised(q_RQHD, *cache, tree=tree)
            if fp8
            else paged_attention(q_RQHD, *cache, tree=tree).flatten(0, 1).flatten(1)
        )
        out_TE = products(attended_TE, attention.output.weight, in_parts=True)
        norm = rms_norm_residual_quantised if fp8 else rms_norm_residual
        normed_TE, residual_TE = norm(out_TE, states_TE, head.feed_forward_norm.weight, eps)
        gated_TF = (silu_multiply_quantised if fp8 else silu_multiply)(
            products(normed_TE, feed_forward.gate_up.weight)
        )
        out_TE = products(gated_TF, feed_forward.down.weight, in_parts=True)
        return norm(out_TE, residual_TE, head.norm.weight, eps)

    def _inputs(
        self, states_TE: torch.Tensor, following_T: torch.Tensor, fp8: bool = False
    ) -> torch.Tensor | QuantisedRows:
        norms = self.head.embedding_norm.weight, self.head.hidden_norm.weight
        return (eagle_inputs_quantised if fp8 else eagle_inputs)(
            following_T,
            self.context.policy.embedding.weight,
            states_TE,
            *norms,
            self.head.config.layer.norm_eps,
        )

    def _logits(self, normed_TE: torch.Tensor | QuantisedRows) -> DraftLogits:
        wide = torch.float64 if normed_TE.dtype == torch.float64 else torch.float32
        scores_TN = self.products(normed_TE, self.head.head.weight, wide)
        vocabulary_N = None if self.whole_vocabulary else self.head.draft_to_target
        return DraftLogits(scores_TN, vocabulary_N, self.head.config.layer.vocab_size)

    # -- learning --

    @property
    def recording(self) -> StateRecording:
        return self

    def observe_head(self) -> None:
        self.products.refresh()

    def record_states(self, max_bytes: int) -> None:
        policy = self.context.policy
        shape = RecorderShape.within(
            max_bytes,
            self.captured_layers,
            self.context.request_tokens,
            policy.config.hidden_size,
            policy.dtype,
        )
        if shape.rows:
            self.recorder = StateRecorder(shape, len(self.context.rows.length), policy.device)
            self.wants_hidden = True

    def take_states(self) -> Mapping[tuple[int, ...], TextStates]:
        return self.recorder.take() if self.recorder is not None else {}

    # -- checkpoints --

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.head.state_dict().items()}

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        self.head.load_state_dict(tensors)
        self.observe_head()
