"""Fills the cache for prompts, in chunks under a token budget, each distinct prompt once.

A prompt's last token is not prefilled: every row runs it as its first decode step, which samples from it. So
siblings share the whole blocks before it and get a copy of the partial one:

    prompt of 39 tokens    |  block 0  |  block 1  | 6 tokens of block 2 | last token
    sibling A                 shared      shared      own copy of 2         decodes here first
    sibling B                 shared      shared      own copy of 2         decodes here first
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.drafting.base import Drafter, TargetPrefill
from paceline.engine.request_state import RequestState
from paceline.paged.cache import BLOCK_SIZE
from paceline.paged.forward import PagedForward
from paceline.policy.states import to_device


@dataclass(eq=False)
class Prefill:
    """Tokens whose keys and values must be in `blocks` before the sequences that wait for them can run."""

    tokens: list[int]
    blocks: list[int]
    # Leading tokens that are cached.
    done: int
    # The token after `tokens`, which every row runs as its first decode step.
    last: int
    # By drafter that follows the policy: its state at the last token.
    handover: dict[str, torch.Tensor] = field(default_factory=dict)
    waiting: list[RequestState] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.done >= len(self.tokens)


@dataclass(eq=False)
class SharedPrompt:
    """The cached prompt of a group; holds its own references to the blocks while siblings still wait."""

    prefill: Prefill
    # Leading tokens that were in the cache of earlier requests.
    reused: int = 0

    @property
    def whole_blocks(self) -> list[int]:
        """The full blocks, which siblings share."""
        return self.prefill.blocks[: len(self.prefill.tokens) // BLOCK_SIZE]

    @property
    def partial_block(self) -> int | None:
        """The block that siblings get a copy of, because they will write into it; None if there is none."""
        return self.prefill.blocks[-1] if len(self.prefill.tokens) % BLOCK_SIZE else None


def run_chunk(
    forward: PagedForward, queue: deque[Prefill], token_budget: int, followers: Sequence[Drafter] = ()
) -> int:
    """Advances the prefills at the head of the queue by at most the budget; returns the number of tokens."""
    chosen: list[tuple[Prefill, int]] = []
    left = token_budget
    for prefill in queue:
        if left <= 0:
            break
        count = min(left, len(prefill.tokens) - prefill.done)
        chosen.append((prefill, count))
        left -= count
    chosen = [(prefill, count) for prefill, count in chosen if count]
    if chosen:
        _forward_chunks(forward, chosen, followers)
    for prefill, count in chosen:
        prefill.done += count
    return token_budget - left


def _forward_chunks(
    forward: PagedForward, chunks: list[tuple[Prefill, int]], followers: Sequence[Drafter]
) -> None:
    """Runs the next tokens of each prefill, packed, and passes the policy's states to the followers."""
    spans = [np.arange(prefill.done, prefill.done + count) for prefill, count in chunks]
    slots = []
    for (prefill, _), span in zip(chunks, spans, strict=True):
        slots.append(np.asarray(prefill.blocks)[span // BLOCK_SIZE] * BLOCK_SIZE + span % BLOCK_SIZE)
    tokens = [
        token for prefill, count in chunks for token in prefill.tokens[prefill.done : prefill.done + count]
    ]
    tables = np.zeros((len(chunks), max(len(prefill.blocks) for prefill, _ in chunks)), dtype=np.int32)
    for row, (prefill, _) in enumerate(chunks):
        tables[row, : len(prefill.blocks)] = prefill.blocks
    boundaries = np.cumsum([0, *(count for _, count in chunks)])
    contexts = np.array([prefill.done for prefill, _ in chunks])

    def tensor(values: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(values), forward.policy.device)

    positions_T = tensor(np.concatenate(spans))
    slots_T = tensor(np.concatenate(slots))
    captured = forward.prefill(
        tensor(np.array(tokens)), positions_T, slots_T, tensor(tables), tensor(boundaries), tensor(contexts)
    )
    if not followers:
        return
    following = [
        token
        for prefill, count in chunks
        for token in [*prefill.tokens, prefill.last][prefill.done + 1 : prefill.done + count + 1]
    ]
    last_S, stops = tensor(boundaries[1:] - 1), tuple(boundaries[1:].tolist())
    seen = TargetPrefill(tensor(np.array(following)), positions_T, slots_T, last_S, stops, captured)
    for follower in followers:
        for (prefill, _), line in zip(chunks, follower.observe_prefill(seen), strict=True):
            prefill.handover[follower.name] = line
