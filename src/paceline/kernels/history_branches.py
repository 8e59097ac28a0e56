"""What history knows to follow a row's last tokens: all candidates of `history_lookup.py`, best first."""

import numpy as np
import torch

from paceline.kernels.history_index import (
    END,
    HASHING,
    LENGTHS,
    MIN_MATCH,
    HistoryIndex,
    index_running_reference,
    index_running_triton,
)
from paceline.kernels.history_lookup import find_matches, find_matches_reference, followed
from paceline.kernels.operation import next_power_of_2
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous

# Candidates of a row.
BRANCHES = 2 * len(LENGTHS)


def find_branches_reference(
    slots_R: torch.Tensor, tokens_SW: torch.Tensor, length_S: torch.Tensor, index: HistoryIndex, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Indexes the rows and returns tokens `[R, C, count]`, matched tokens and key of their candidates."""
    index_running_reference(slots_R, tokens_SW, length_S, index)
    index.clock_1.add_(1)
    found = find_matches_reference(slots_R, tokens_SW, length_S, index, count)
    follow_RC1 = found.follow_RC[..., None]
    step_RCK = followed(found.own_RC[..., None], follow_RC1, np.arange(count))
    text_RCK = np.take_along_axis(found.following_RCK, step_RCK, 2)
    exists_RCK = (found.key_RC >= 0)[..., None] & (step_RCK < follow_RC1)
    tokens_RCK = np.where(exists_RCK, text_RCK, END)
    return tuple(torch.from_numpy(x) for x in (tokens_RCK, found.matched_RC, found.key_RC))


@triton.jit
def _branch_kernel(
    slots_ptr,
    tokens_ptr,
    length_ptr,
    bank_ptr,
    finished_ptr,
    running_ptr,
    oldest_ptr,
    clock_ptr,
    prompt_ptr,
    indexed_ptr,
    out_tokens_ptr,
    out_matched_ptr,
    out_key_ptr,
    width,
    bank_tokens,
    finished_mask,
    running_mask,
    count,
    MAX_MATCH: tl.constexpr,
    MIN_MATCH: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    LOCATION_BITS: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row."""
    launch_next(PDL)
    wait_previous(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    length = tl.load(length_ptr + slot)
    if row == 0:
        tl.store(clock_ptr, tl.load(clock_ptr) + 1)
    tl.store(indexed_ptr + slot, tl.maximum(tl.load(indexed_ptr + slot), length - 1))
    source, position, matched, follow, key = find_matches(
        slot,
        tokens_ptr + slot * width,
        length,
        tokens_ptr,
        length_ptr,
        bank_ptr,
        finished_ptr,
        running_ptr,
        oldest_ptr,
        prompt_ptr,
        width,
        bank_tokens,
        finished_mask,
        running_mask,
        count,
        MAX_MATCH,
        MIN_MATCH,
        MULTIPLIER,
        LOCATION_BITS,
        BLOCK_COUNT,
    )
    c = tl.arange(0, 8)
    running = (c >= 4)[:, None]
    ahead = tl.arange(0, BLOCK_COUNT)[None, :]
    reach = follow[:, None]
    # A row's own text continues with what is being proposed, as in `history_lookup.py`.
    step = tl.where(running & (source == slot)[:, None], ahead % tl.maximum(reach, 1), ahead)
    said = (key >= 0)[:, None] & (step < reach)
    place = position[:, None] + 1 + step
    out = tl.load(tokens_ptr + source[:, None] * width + place, mask=said & running, other=-1)
    banked = tl.load(bank_ptr + place, mask=said & (running == 0), other=-1).to(tl.int64)
    line = row * 8 + c
    tl.store(
        out_tokens_ptr + line[:, None] * count + ahead, tl.where(running, out, banked), mask=ahead < count
    )
    tl.store(out_matched_ptr + line, matched.to(tl.int64))
    tl.store(out_key_ptr + line, key.to(tl.int64))


def find_branches_triton(
    slots_R: torch.Tensor, tokens_SW: torch.Tensor, length_S: torch.Tensor, index: HistoryIndex, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index_running_triton(slots_R, tokens_SW, length_S, index)
    shape = len(slots_R), BRANCHES
    tokens_RCK = torch.empty(*shape, count, dtype=torch.int64, device=slots_R.device)
    matched_RC, key_RC = torch.empty(2, *shape, dtype=torch.int64, device=slots_R.device)
    _branch_kernel[(len(slots_R),)](
        slots_R,
        tokens_SW,
        length_S,
        index.bank_T,
        index.finished_B,
        index.running_B,
        index.oldest_1,
        index.clock_1,
        index.prompt_S,
        index.indexed_S,
        tokens_RCK,
        matched_RC,
        key_RC,
        tokens_SW.shape[1],
        len(index.bank_T),
        len(index.finished_B) - 1,
        len(index.running_B) - 1,
        count,
        MIN_MATCH=MIN_MATCH,
        BLOCK_COUNT=next_power_of_2(count),
        **HASHING,
        **launch_options(num_warps=1),
    )
    return tokens_RCK, matched_RC, key_RC


def branches_from_history(
    slots_R: torch.Tensor, tokens_SW: torch.Tensor, length_S: torch.Tensor, index: HistoryIndex, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indexes what the rows have gained, then returns what may follow: up to `count` tokens of each branch.

    Returns tokens `[R, BRANCHES, count]`, -1 behind a branch's end, and how many of the row's last tokens
    stand before each branch, `[R, BRANCHES]`. The best comes first, which is `propose_from_history`'s.
    """
    run = find_branches_triton if slots_R.is_cuda else find_branches_reference
    tokens_RCK, matched_RC, key_RC = run(slots_R, tokens_SW, length_S, index, count)
    order_RC = key_RC.sort(dim=1, descending=True, stable=True).indices
    by_key_RCK = order_RC.unsqueeze(-1).expand_as(tokens_RCK)
    return tokens_RCK.gather(1, by_key_RCK), matched_RC.gather(1, order_RC)
