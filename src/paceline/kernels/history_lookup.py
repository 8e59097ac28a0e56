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

import numpy as np
import torch

from paceline.kernels.history_index import (
    _LOCATION_BITS,
    _MAX_MATCH,
    BACK,
    END,
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
from paceline.kernels.operation import next_power_of_2, reference_of
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous

# Candidates of a row.
BRANCHES = 2 * len(LENGTHS)
_MIN_MATCH = tl.constexpr(MIN_MATCH)
_LOCATION_MASK = tl.constexpr((1 << LOCATION_BITS) - 1)


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
def _find_matches(text, index, sizes, slot, length, count, BLOCK_COUNT: tl.constexpr):
    """Returns slot, position, equal tokens, following tokens and key of one row's 8 candidates."""
    _, tokens_ptr, length_ptr = text
    width, bank_tokens, finished_mask, running_mask = sizes
    own_ptr = tokens_ptr + slot * width
    # Candidates: 0-3 from finished text under 2, 4, 8, 16 tokens, 4-7 from running text.
    c = tl.arange(0, 8)
    running = c >= 4
    h, hashes = tl.load(index.prompt_S + slot), tl.zeros((8,), tl.int64)
    for j in tl.static_range(_MAX_MATCH):
        h = mix_token(h, tl.load(own_ptr + tl.maximum(length - 1 - j, 0)))
        hashes = tl.where((2 << (c & 3)) == j + 1, h, hashes)
    known = length + c * 0 >= (2 << (c & 3))
    finished = tl.load(index.finished_B + ((hashes >> 24) & finished_mask), mask=known & (c < 4), other=0)
    finished = tl.where((finished >> _LOCATION_BITS) >= tl.load(index.oldest_1), finished, 0)
    value = tl.where(
        running,
        tl.load(index.running_B + ((hashes >> 24) & running_mask), mask=known & running, other=0),
        finished,
    )
    where = value & _LOCATION_MASK
    source = tl.where(running, where // width, 0)
    position = tl.where(running, where % width, where)
    found = value > 0
    end = tl.where(running, tl.load(length_ptr + source, mask=found, other=0), bank_tokens)

    back = tl.arange(0, _MAX_MATCH)
    own = tl.load(own_ptr + length - 1 - back, mask=back < length, other=-2)
    before = position[:, None] - back[None, :]
    there = found[:, None] & (before >= 0) & (back < length)[None, :]
    text = tl.load(tokens_ptr + source[:, None] * width + before, mask=there & running[:, None], other=-3)
    text = tl.where(
        running[:, None],
        text,
        tl.load(index.bank_T + before, mask=there & (running[:, None] == 0), other=-3).to(tl.int64),
    )
    matched = tl.min(tl.where(there & (text == own[None, :]), _MAX_MATCH, back[None, :]), axis=1)

    ahead = tl.arange(0, BLOCK_COUNT)
    after = position[:, None] + 1 + ahead[None, :]
    there = found[:, None] & (after < end[:, None]) & (ahead < count)[None, :]
    next_bank = tl.load(index.bank_T + after, mask=there & (running[:, None] == 0), other=-1)
    goes_on = there & (running[:, None] | (next_bank >= 0))
    follow = tl.min(tl.where(goes_on, BLOCK_COUNT, ahead[None, :]), axis=1)
    follow = tl.minimum(follow, count)

    key = tl.where(
        found & (matched >= _MIN_MATCH) & (follow > 0), (matched * _MAX_MATCH + follow) * 8 + c, -1
    )
    return source, position, matched, follow, key


@triton.jit
def _look_up_kernel(
    text, index, proposals_ptr, branches, sizes, count, stride, BLOCK_COUNT: tl.constexpr, PDL: tl.constexpr
):
    """One program per row: writes what follows the best candidate to the proposals, or all to `branches`."""
    launch_next(PDL)
    wait_previous(PDL)
    slots_ptr, tokens_ptr, length_ptr = text
    width = sizes[0]
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    length = tl.load(length_ptr + slot)
    if row == 0:
        tl.store(index.clock_1, tl.load(index.clock_1) + 1)
    tl.store(index.indexed_S + slot, tl.maximum(tl.load(index.indexed_S + slot), length - 1))
    source, position, matched, follow, key = _find_matches(
        text, index, sizes, slot, length, count, BLOCK_COUNT
    )
    c = tl.arange(0, 8)
    if branches is None:
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
        banked = tl.load(index.bank_T + start + step, mask=said & (from_row == 0), other=-1).to(tl.int64)
        out = tl.where(from_row, out, banked)
        tl.store(proposals_ptr + slot * stride + ahead, out, mask=ahead < count)
    else:
        out_tokens_ptr, out_matched_ptr, out_key_ptr = branches
        running = (c >= 4)[:, None]
        ahead = tl.arange(0, BLOCK_COUNT)[None, :]
        reach = follow[:, None]
        step = tl.where(running & (source == slot)[:, None], ahead % tl.maximum(reach, 1), ahead)
        said = (key >= 0)[:, None] & (step < reach)
        place = position[:, None] + 1 + step
        out = tl.load(tokens_ptr + source[:, None] * width + place, mask=said & running, other=-1)
        banked = tl.load(index.bank_T + place, mask=said & (running == 0), other=-1).to(tl.int64)
        line = row * 8 + c
        out = tl.where(running, out, banked)
        tl.store(out_tokens_ptr + line[:, None] * count + ahead, out, mask=ahead < count)
        tl.store(out_matched_ptr + line, matched.to(tl.int64))
        tl.store(out_key_ptr + line, key.to(tl.int64))


def _look_up_triton(slots_R, tokens_SW, length_S, index, count, proposals_SK=None, branches=None):
    """Two launches: every row is indexed before any looks up, so it does not matter which runs first."""
    index_running_triton(slots_R, tokens_SW, length_S, index)
    sizes = tokens_SW.shape[1], len(index.bank_T), len(index.finished_B) - 1, len(index.running_B) - 1
    _look_up_kernel[(len(slots_R),)](
        (slots_R, tokens_SW, length_S),
        index,
        proposals_SK,
        branches,
        sizes,
        count,
        0 if proposals_SK is None else proposals_SK.shape[1],
        BLOCK_COUNT=next_power_of_2(count),
        **launch_options(num_warps=1),
    )


@reference_of(_look_up_triton)
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
    tokens_RCK, _, key_RC = find_branches.reference(slots_R, tokens_SW, length_S, index, count)
    best_R = key_RC.numpy().argmax(1)
    proposals_SK.numpy()[slots_R.numpy(), :count] = tokens_RCK.numpy()[np.arange(len(slots_R)), best_R]


def find_branches_triton(slots_R, tokens_SW, length_S, index, count):
    shape = len(slots_R), BRANCHES
    tokens_RCK = torch.empty(*shape, count, dtype=torch.int64, device=slots_R.device)
    matched_RC, key_RC = torch.empty(2, *shape, dtype=torch.int64, device=slots_R.device)
    found = tokens_RCK, matched_RC, key_RC
    _look_up_triton(slots_R, tokens_SW, length_S, index, count, branches=found)
    return found


@reference_of(find_branches_triton)
def find_branches(
    slots_R: torch.Tensor, tokens_SW: torch.Tensor, length_S: torch.Tensor, index: HistoryIndex, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Indexes the rows and returns tokens `[R, C, count]`, matched tokens and key of their candidates."""
    index_running_reference(slots_R, tokens_SW, length_S, index)
    index.clock_1.add_(1)
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
    own_RC = running_C & (slot_RC == slots[:, None])
    follow_RC1, ahead_K = follow_RC[..., None], np.arange(count)
    # A row's own text continues with what is being proposed: a loop is proposed as far as asked for.
    step_RCK = np.where(own_RC[..., None], ahead_K % np.maximum(follow_RC1, 1), ahead_K)
    exists_RCK = (key_RC >= 0)[..., None] & (step_RCK < follow_RC1)
    tokens_RCK = np.where(exists_RCK, np.take_along_axis(following_RCK, step_RCK, 2), END)
    return tuple(torch.from_numpy(x) for x in (tokens_RCK, matched_RC, key_RC))


def branches_from_history(
    slots_R: torch.Tensor, tokens_SW: torch.Tensor, length_S: torch.Tensor, index: HistoryIndex, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indexes what the rows have gained, then returns what may follow: up to `count` tokens of each branch.

    Returns tokens `[R, BRANCHES, count]`, -1 behind a branch's end, and how many of the row's last tokens
    stand before each branch, `[R, BRANCHES]`. The best comes first, which is `propose_from_history`'s.
    """
    tokens_RCK, matched_RC, key_RC = find_branches(slots_R, tokens_SW, length_S, index, count)
    order_RC = key_RC.sort(dim=1, descending=True, stable=True).indices
    by_key_RCK = order_RC.unsqueeze(-1).expand_as(tokens_RCK)
    return tokens_RCK.gather(1, by_key_RCK), matched_RC.gather(1, order_RC)
