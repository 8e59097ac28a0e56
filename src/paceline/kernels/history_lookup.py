"""Proposals from the history index: what followed a row's last tokens when they were written before.

A row looks up its last tokens under each length in both tables of `history_index.py`, eight candidates in
all, and compares the text itself:

    candidate     0  1  2  3   |  4  5  6  7
    table         finished     |  running
    length        2  4  8  16  |  2  4  8  16

The longest match of up to MAX_MATCH tokens wins, then the one with more to propose, then running text. A step
reads the same few kilobytes for each row however long the rows are: 16 tokens, 8 buckets, 8 times 16 + k
tokens around the candidates, and it indexes what the row has gained.

Shape letters beside those of `history_index.py`: C candidates, K proposals.
"""

from dataclasses import dataclass

import numpy as np
import torch

from paceline.kernels.history_index import (
    BACK,
    END,
    HASHING,
    LENGTHS,
    LOCATION_BITS,
    MAX_MATCH,
    MIN_MATCH,
    HistoryIndex,
    buckets_of,
    index_running_reference,
    index_running_triton,
    mix_token,
    window_hashes,
)
from paceline.kernels.operation import next_power_of_2
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous


def propose_reference(
    slots_R: torch.Tensor,
    tokens_SW: torch.Tensor,
    length_S: torch.Tensor,
    index: HistoryIndex,
    count: int,
    proposals_SK: torch.Tensor,
) -> None:
    index_running_reference(slots_R, tokens_SW, length_S, index)
    index.clock_1.add_(1)
    found = find_matches_reference(slots_R, tokens_SW, length_S, index, count)
    row_R = np.arange(len(slots_R))
    best_R = found.key_RC.argmax(1)
    follow_R1 = found.follow_RC[row_R, best_R][:, None]
    step_RK = followed(found.own_RC[row_R, best_R][:, None], follow_R1, np.arange(count))
    chosen_RK = np.take_along_axis(found.following_RCK[row_R, best_R], step_RK, 1)
    exists_RK = (found.key_RC[row_R, best_R] >= 0)[:, None] & (step_RK < follow_R1)
    proposals_SK.numpy()[slots_R.numpy(), :count] = np.where(exists_RK, chosen_RK, END)


@dataclass(frozen=True)
class Matches:
    """Where the rows' last tokens stand elsewhere: C candidates a row."""

    # Whether it is the row's own text.
    own_RC: np.ndarray
    # Tokens that are equal, and that follow.
    matched_RC: np.ndarray
    follow_RC: np.ndarray
    # The largest is the best; -1: there is nothing to propose.
    key_RC: np.ndarray
    # What stands behind the equal tokens; anything beyond those that follow.
    following_RCK: np.ndarray


def find_matches_reference(
    slots_R: torch.Tensor, tokens_SW: torch.Tensor, length_S: torch.Tensor, index: HistoryIndex, count: int
) -> Matches:
    """Returns all candidates, of each of which up to `count` tokens could be proposed."""
    slots, tokens, lengths = slots_R.numpy(), tokens_SW.numpy(), length_S.numpy()
    bank = index.bank_T.numpy()
    width, kinds = tokens.shape[1], len(LENGTHS)
    length_R1 = lengths[slots][:, None]
    own_RM = length_R1 - 1 - BACK
    suffix_RM = tokens[slots[:, None], np.maximum(own_RM, 0)]
    value_RC = _candidates(suffix_RM, length_R1, index.prompt_S.numpy()[slots], index)
    where_RC = value_RC & ((1 << LOCATION_BITS) - 1)
    running_C = np.arange(2 * kinds) >= kinds
    slot_RC = np.where(running_C, where_RC // width, 0)
    position_RC = np.where(running_C, where_RC % width, where_RC)
    # The tokens up to the last equal one, newest first, and those behind it.
    around_RCN = position_RC[..., None] + np.concatenate((-BACK, np.arange(1, count + 1)))
    inside = np.maximum(around_RCN, 0)
    text_RCN = np.concatenate(
        (
            bank[np.minimum(inside[:, :kinds], len(bank) - 1)],
            tokens[slot_RC[:, kinds:, None], np.minimum(inside[:, kinds:], width - 1)],
        ),
        axis=1,
    )
    equal_RCM = (text_RCN[..., :MAX_MATCH] == suffix_RM[:, None]) & (around_RCN[..., :MAX_MATCH] >= 0)
    matched_RC = _leading(equal_RCM & (own_RM >= 0)[:, None])
    following_RCK = text_RCN[..., MAX_MATCH:]
    end_RC1 = np.where(running_C, lengths[slot_RC], len(bank))[..., None]
    follow_RC = _leading((around_RCN[..., MAX_MATCH:] < end_RC1) & (following_RCK != END))
    key_RC = (matched_RC * MAX_MATCH + follow_RC) * 2 * kinds + np.arange(2 * kinds)
    key_RC = np.where((value_RC > 0) & (matched_RC >= MIN_MATCH) & (follow_RC > 0), key_RC, -1)
    return Matches(running_C & (slot_RC == slots[:, None]), matched_RC, follow_RC, key_RC, following_RCK)


def followed(own: np.ndarray, follow: np.ndarray, ahead_K: np.ndarray) -> np.ndarray:
    """Returns which of the tokens that follow is proposed at each place.

    A row's own text continues with what is being proposed: a loop is proposed as far as asked for.
    """
    return np.where(own, ahead_K % np.maximum(follow, 1), ahead_K)


def _leading(true: np.ndarray) -> np.ndarray:
    """Returns how many are true before the first that is not, along the last axis."""
    return np.where(true.all(-1), true.shape[-1], (~true).argmax(-1))


def _candidates(
    suffix_RM: np.ndarray, length_R1: np.ndarray, prompt_R: np.ndarray, index: HistoryIndex
) -> np.ndarray:
    """The tables' values for the rows' last tokens, `[R, C]`; 0 where there is none."""
    hashes_RL = window_hashes(suffix_RM, prompt_R)
    finished_B, running_B = index.finished_B.numpy(), index.running_B.numpy()
    finished_RL = finished_B[buckets_of(hashes_RL, finished_B)]
    finished_RL = np.where(finished_RL >> LOCATION_BITS >= int(index.oldest_1), finished_RL, 0)
    value_RC = np.concatenate((finished_RL, running_B[buckets_of(hashes_RL, running_B)]), axis=1)
    return np.where(length_R1 >= LENGTHS * 2, value_RC, 0)


@triton.jit
def find_matches(
    slot,
    own_ptr,
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
    MAX_MATCH: tl.constexpr,
    MIN_MATCH: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    LOCATION_BITS: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
):
    """Returns slot, position, equal tokens, following tokens and key of one row's 8 candidates."""
    # Candidates: 0-3 from finished text under 2, 4, 8, 16 tokens, 4-7 from running text.
    c = tl.arange(0, 8)
    running = c >= 4
    h, hashes = tl.load(prompt_ptr + slot), tl.zeros((8,), tl.int64)
    for j in tl.static_range(MAX_MATCH):
        h = mix_token(h, tl.load(own_ptr + tl.maximum(length - 1 - j, 0)), MULTIPLIER)
        hashes = tl.where((2 << (c & 3)) == j + 1, h, hashes)
    known = length + c * 0 >= (2 << (c & 3))
    finished = tl.load(finished_ptr + ((hashes >> 24) & finished_mask), mask=known & (c < 4), other=0)
    finished = tl.where((finished >> LOCATION_BITS) >= tl.load(oldest_ptr), finished, 0)
    value = tl.where(
        running,
        tl.load(running_ptr + ((hashes >> 24) & running_mask), mask=known & running, other=0),
        finished,
    )
    where = value & ((1 << LOCATION_BITS) - 1)
    source = tl.where(running, where // width, 0)
    position = tl.where(running, where % width, where)
    found = value > 0
    end = tl.where(running, tl.load(length_ptr + source, mask=found, other=0), bank_tokens)

    back = tl.arange(0, MAX_MATCH)
    own = tl.load(own_ptr + length - 1 - back, mask=back < length, other=-2)
    before = position[:, None] - back[None, :]
    there = found[:, None] & (before >= 0) & (back < length)[None, :]
    text = tl.load(tokens_ptr + source[:, None] * width + before, mask=there & running[:, None], other=-3)
    text = tl.where(
        running[:, None],
        text,
        tl.load(bank_ptr + before, mask=there & (running[:, None] == 0), other=-3).to(tl.int64),
    )
    matched = tl.min(tl.where(there & (text == own[None, :]), MAX_MATCH, back[None, :]), axis=1)

    ahead = tl.arange(0, BLOCK_COUNT)
    after = position[:, None] + 1 + ahead[None, :]
    there = found[:, None] & (after < end[:, None]) & (ahead < count)[None, :]
    next_bank = tl.load(bank_ptr + after, mask=there & (running[:, None] == 0), other=-1)
    goes_on = there & (running[:, None] | (next_bank >= 0))
    follow = tl.min(tl.where(goes_on, BLOCK_COUNT, ahead[None, :]), axis=1)
    follow = tl.minimum(follow, count)

    key = tl.where(found & (matched >= MIN_MATCH) & (follow > 0), (matched * MAX_MATCH + follow) * 8 + c, -1)
    return source, position, matched, follow, key


@triton.jit
def _propose_kernel(
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
    proposals_ptr,
    width,
    bank_tokens,
    finished_mask,
    running_mask,
    count,
    num_proposals,
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
    own_ptr = tokens_ptr + slot * width
    if row == 0:
        tl.store(clock_ptr, tl.load(clock_ptr) + 1)
    tl.store(indexed_ptr + slot, tl.maximum(tl.load(indexed_ptr + slot), length - 1))
    source, position, _, follow, key = find_matches(
        slot,
        own_ptr,
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
    ahead = tl.arange(0, BLOCK_COUNT)
    best = tl.max(key, axis=0)
    chosen = c == (best & 7)
    reach = tl.max(tl.where(chosen, follow, 0), axis=0)
    start = tl.max(tl.where(chosen, position, 0), axis=0) + 1
    chosen_slot = tl.max(tl.where(chosen, source, 0), axis=0)
    from_row = ahead * 0 + (best & 7) >= 4
    # A row's own text continues with what is being proposed: a loop is proposed as far as asked for.
    step = tl.where(from_row & (chosen_slot == slot), ahead % tl.maximum(reach, 1), ahead)
    said = (ahead * 0 + best >= 0) & (step < reach)
    out = tl.load(tokens_ptr + chosen_slot * width + start + step, mask=said & from_row, other=-1)
    out = tl.where(
        from_row, out, tl.load(bank_ptr + start + step, mask=said & (from_row == 0), other=-1).to(tl.int64)
    )
    tl.store(proposals_ptr + slot * num_proposals + ahead, out, mask=ahead < count)


def propose_triton(
    slots_R: torch.Tensor,
    tokens_SW: torch.Tensor,
    length_S: torch.Tensor,
    index: HistoryIndex,
    count: int,
    proposals_SK: torch.Tensor,
) -> None:
    """Two launches: every row is indexed before any looks up, so it does not matter which runs first."""
    index_running_triton(slots_R, tokens_SW, length_S, index)
    _propose_kernel[(slots_R.shape[0],)](
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
        proposals_SK,
        tokens_SW.shape[1],
        len(index.bank_T),
        len(index.finished_B) - 1,
        len(index.running_B) - 1,
        count,
        proposals_SK.shape[1],
        MIN_MATCH=MIN_MATCH,
        BLOCK_COUNT=next_power_of_2(count),
        **HASHING,
        **launch_options(num_warps=1),
    )


def propose_from_history(
    slots_R: torch.Tensor,
    tokens_SW: torch.Tensor,
    length_S: torch.Tensor,
    index: HistoryIndex,
    count: int,
    proposals_SK: torch.Tensor,
) -> None:
    """Indexes what the rows have gained, then writes up to `count` proposed tokens for each.

    Where there is nothing to propose it writes -1, which no policy samples.
    """
    run = propose_triton if slots_R.is_cuda else propose_reference
    run(slots_R, tokens_SW, length_S, index, count, proposals_SK)
