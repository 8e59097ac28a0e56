"""Filling the cache for prompts, in chunks under a token budget, each distinct prompt once.

A prompt's last token is not prefilled: every row runs it as its first decode step, which samples from it. So siblings
share the whole blocks before it and get a copy of the partial one:

    prompt of 39 tokens    |  block 0  |  block 1  | 6 tokens of block 2 | last token
    sibling A                 shared      shared      own copy of 2         decodes here first
    sibling B                 shared      shared      own copy of 2         decodes here first
"""

from collections import deque
from dataclasses import dataclass, field

import torch

from paceline.engine.cache import BLOCK_SIZE
from paceline.engine.forward import PagedForward
from paceline.engine.sequence import Sequence


@dataclass(eq=False)
class Prefill:
    """Tokens whose keys and values must be in `blocks` before the sequences that wait for them can run."""

    tokens: list[int]
    blocks: list[int]
    done: int  # leading tokens that are cached
    waiting: list[Sequence] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.done >= len(self.tokens)


@dataclass(eq=False)
class SharedPrompt:
    """The cached prompt of a group; holds its own references to the blocks while siblings may still come."""

    prefill: Prefill

    @property
    def whole_blocks(self) -> list[int]:
        return self.prefill.blocks[: len(self.prefill.tokens) // BLOCK_SIZE]

    @property
    def partial_block(self) -> int | None:
        return self.prefill.blocks[-1] if len(self.prefill.tokens) % BLOCK_SIZE else None


def run_chunk(forward: PagedForward, queue: deque[Prefill], token_budget: int) -> int:
    """Advances the prefills at the head of the queue by at most the budget; returns how many tokens that were."""
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
        _forward_chunks(forward, chosen)
    for prefill, count in chosen:
        prefill.done += count
    return token_budget - left


def _forward_chunks(forward: PagedForward, chunks: list[tuple[Prefill, int]]) -> None:
    tokens, positions, slots, boundaries, contexts = [], [], [], [0], []
    for prefill, count in chunks:
        span = range(prefill.done, prefill.done + count)
        tokens += prefill.tokens[span.start : span.stop]
        positions += span
        slots += [prefill.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in span]
        boundaries.append(boundaries[-1] + count)
        contexts.append(prefill.done)
    width = max(len(prefill.blocks) for prefill, _ in chunks)
    tables = [prefill.blocks + [0] * (width - len(prefill.blocks)) for prefill, _ in chunks]
    device = forward.policy.device

    def tensor(values: list, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    forward.prefill(tensor(tokens), tensor(positions), tensor(slots), tensor(tables, torch.int32), tensor(boundaries), tensor(contexts))
