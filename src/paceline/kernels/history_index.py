"""An index of what has been written: where have the last tokens of a row been seen before under its prompt,
and what followed?

Every position that has a successor is filed under its last 2, 4, 8 and 16 tokens, each hashed together with
the prompt:

    finished text    ... -1 | p p | a b c d e | -1 ...      bank_T, one entry after the other, the oldest overwritten
    running text     p p a b c |                            the rows themselves

    bucket of hash(prompt, b, c)  ->  where `c` stands       the newest occurrence wins, whoever else had the bucket

There is a table for finished text and one for running text, so that what runs cannot displace what is kept. A
row looks its last tokens up under each length in both, eight candidates in all, and compares the text itself:
the longest match of up to `MAX_MATCH` tokens wins, then the one with more to propose, then running text. So a
bucket may be wrong or long overwritten, and nothing is ever deleted. A step reads the same few kilobytes for
each row however long the rows are: 16 tokens, 8 buckets, 8 times 16 + k tokens around the candidates, and it
files what the row has gained. A row that has run without this drafter is filed when it next proposes.

All is integers and maxima: the same on every device, and in whatever order programs run.
"""

from dataclasses import dataclass

import torch

from paceline.kernels.triton_support import (
    cdiv,
    launch_next,
    launch_options,
    next_power_of_2,
    tl,
    triton,
    wait_previous,
)

MAX_MATCH = 16  # tokens compared; a longer match counts as this long
MIN_MATCH = 2  # one equal token says too little
LENGTHS = (2, 4, 8, 16)  # under which positions are filed
END = -1  # after each entry of the bank; no token
LOCATION_BITS = 32  # of a table's value; above them, what is newer is larger
_MULTIPLIER = -7046029254386353131  # 2^64 over the golden ratio, as a signed number
_FILED_AT_ONCE, _FILING_PARTS = 64, 4
_BANKED_AT_ONCE = 256


@dataclass(frozen=True)
class HistoryIndex:
    """Values of the tables: (when, where), 0 is empty. Both tables have powers of 2."""

    bank_T: torch.Tensor  # int32
    finished_B: torch.Tensor  # when: number of the entry; where: in the bank
    running_B: torch.Tensor  # when: `clock_1`; where: slot * width + position
    oldest_1: torch.Tensor  # number of the oldest entry that still exists
    clock_1: torch.Tensor  # steps proposed for
    prompt_S: torch.Tensor  # hash of each row's prompt
    filed_S: torch.Tensor  # leading tokens of each row that are in the table

    @classmethod
    def empty(
        cls, slots: int, bank_tokens: int, running_tokens: int, max_buckets: int, device: torch.device
    ) -> "HistoryIndex":
        """About two buckets for each token, of up to four that it could use: siblings write much alike, and
        any one of them finds it.
        """

        def zeros(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        finished, running = (
            min(max_buckets, next_power_of_2(2 * tokens + 1) // 2) for tokens in (bank_tokens, running_tokens)
        )
        return cls(
            zeros(bank_tokens, torch.int32),
            zeros(finished),
            zeros(running),
            zeros(1),
            zeros(1) + 1,
            zeros(slots),
            zeros(slots),
        )


def _hashes(window_XM: torch.Tensor, prompt_X: torch.Tensor) -> torch.Tensor:
    """Of the last 2, 4, 8 and 16 tokens; the window has the newest first."""
    h, found = prompt_X, []
    for j in range(MAX_MATCH):
        h = (h ^ window_XM[..., j]) * _MULTIPLIER
        h = h ^ (h >> 29)
        if j + 1 in LENGTHS:
            found.append(h)
    return torch.stack(found, dim=-1)


def _buckets(hashes: torch.Tensor, table_B: torch.Tensor) -> torch.Tensor:
    return (hashes >> 24) & (len(table_B) - 1)


def _file(
    table_B: torch.Tensor, hashes_XN: torch.Tensor, values_X: torch.Tensor, known_X: torch.Tensor
) -> None:
    """`known_X`: tokens up to and including the position; shorter than a length, it is not filed under it."""
    values_XN = torch.where(
        known_X.unsqueeze(-1) >= torch.tensor(LENGTHS, device=known_X.device), values_X.unsqueeze(-1), 0
    )
    table_B.scatter_reduce_(0, _buckets(hashes_XN, table_B).flatten(), values_XN.flatten(), "amax")


def file_running_reference(
    slots_R: torch.Tensor, tokens_SW: torch.Tensor, length_S: torch.Tensor, index: HistoryIndex
) -> None:
    first_R, stop_R = index.filed_S[slots_R], length_S[slots_R] - 1  # the last token has nothing after it yet
    span = int((stop_R - first_R).max())
    if span <= 0:
        return
    position_RN = first_R.unsqueeze(1) + torch.arange(span, device=slots_R.device)
    window_RNM = (position_RN.unsqueeze(-1) - torch.arange(MAX_MATCH, device=slots_R.device)).clamp(min=0)
    inside_RN = position_RN < stop_R.unsqueeze(1)
    tokens_RNM = tokens_SW[slots_R[:, None, None], window_RNM.clamp(max=tokens_SW.shape[1] - 1)]
    where_RN = slots_R.unsqueeze(1) * tokens_SW.shape[1] + position_RN
    values_RN = torch.where(inside_RN, (index.clock_1 << LOCATION_BITS) | where_RN, 0)
    hashes_RNL = _hashes(tokens_RNM, index.prompt_S[slots_R].unsqueeze(1).expand_as(position_RN))
    _file(index.running_B, hashes_RNL, values_RN, position_RN + 1)
    index.filed_S[slots_R] = torch.maximum(first_R, stop_R)


def propose_reference(
    slots_R: torch.Tensor,
    tokens_SW: torch.Tensor,
    length_S: torch.Tensor,
    index: HistoryIndex,
    count: int,
    proposals_SK: torch.Tensor,
) -> None:
    file_running_reference(slots_R, tokens_SW, length_S, index)
    index.clock_1.add_(1)
    device, width, kinds = slots_R.device, tokens_SW.shape[1], len(LENGTHS)
    back_M, ahead_K = torch.arange(MAX_MATCH, device=device), torch.arange(count, device=device)
    length_R = length_S[slots_R]
    own_RM = length_R.unsqueeze(1) - 1 - back_M
    suffix_RM = tokens_SW[slots_R.unsqueeze(1), own_RM.clamp(min=0)]
    hashes_RL = _hashes(suffix_RM, index.prompt_S[slots_R])
    finished_RL = index.finished_B[_buckets(hashes_RL, index.finished_B)]
    finished_RL = torch.where(finished_RL >> LOCATION_BITS >= index.oldest_1, finished_RL, 0)
    value_RC = torch.cat((finished_RL, index.running_B[_buckets(hashes_RL, index.running_B)]), dim=1)
    value_RC = torch.where(length_R.unsqueeze(1) >= torch.tensor(LENGTHS * 2, device=device), value_RC, 0)
    where_RC = value_RC & ((1 << LOCATION_BITS) - 1)
    running_C = torch.arange(2 * kinds, device=device) >= kinds
    slot_RC = torch.where(running_C, where_RC // width, 0)
    position_RC = torch.where(running_C, where_RC % width, where_RC)

    def text(position_RCN: torch.Tensor) -> torch.Tensor:
        """Around the candidates; whatever stands where there is nothing."""
        bank = index.bank_T[position_RCN[:, :kinds].clamp(0, len(index.bank_T) - 1)]
        return torch.cat(
            (bank, tokens_SW[slot_RC[:, kinds:, None], position_RCN[:, kinds:].clamp(0, width - 1)]), dim=1
        )

    before_RCM = position_RC.unsqueeze(-1) - back_M
    equal_RCM = (text(before_RCM) == suffix_RM.unsqueeze(1)) & (before_RCM >= 0) & (own_RM >= 0).unsqueeze(1)
    matched_RC = equal_RCM.long().cumprod(-1).sum(-1)
    after_RCK = position_RC.unsqueeze(-1) + 1 + ahead_K
    end_RC1 = torch.where(running_C, length_S[slot_RC], len(index.bank_T)).unsqueeze(-1)
    follow_RC = ((after_RCK < end_RC1) & (text(after_RCK) != END)).long().cumprod(-1).sum(-1)
    key_RC = (matched_RC * MAX_MATCH + follow_RC) * 2 * kinds + torch.arange(2 * kinds, device=device)
    key_RC = torch.where((value_RC > 0) & (matched_RC >= MIN_MATCH) & (follow_RC > 0), key_RC, -1)
    best_R1 = key_RC.argmax(1, keepdim=True)
    follow_R1, position_R1 = follow_RC.gather(1, best_R1), position_RC.gather(1, best_R1)
    # Its own text goes on with what is being proposed: a loop is proposed as far as asked for.
    own_R1 = running_C[best_R1] & (slot_RC.gather(1, best_R1) == slots_R.unsqueeze(1))
    step_RK = torch.where(own_R1, ahead_K % follow_R1.clamp(min=1), ahead_K)
    best_RCK = best_R1.unsqueeze(-1).expand(-1, -1, count)
    chosen_RK = (
        text((position_R1 + 1 + step_RK).unsqueeze(1).expand(-1, 2 * kinds, -1))
        .gather(1, best_RCK)
        .squeeze(1)
    )
    said_RK = (key_RC.gather(1, best_R1) >= 0) & (step_RK < follow_R1)
    proposals_SK[slots_R, :count] = torch.where(said_RK, chosen_RK.long(), END)


def file_finished(
    index: HistoryIndex,
    positions_N: torch.Tensor,
    context_N: torch.Tensor,
    prompt_N: torch.Tensor,
    number_N: torch.Tensor,
) -> None:
    """Files positions of the bank. `context_N`: tokens of the same entry up to and including each."""
    window_NM = index.bank_T[
        (positions_N.unsqueeze(1) - torch.arange(MAX_MATCH, device=positions_N.device)).clamp(min=0)
    ].long()
    _file(
        index.finished_B, _hashes(window_NM, prompt_N), (number_N << LOCATION_BITS) | positions_N, context_N
    )


def bank_row_reference(
    tokens_SW: torch.Tensor,
    index: HistoryIndex,
    slot: int,
    first: int,
    prompt: int,
    length: int,
    start: int,
    number: int,
) -> None:
    index.bank_T[start : start + length - first] = tokens_SW[slot, first:length]
    index.bank_T[start + length - first] = END
    context_N = torch.arange(prompt, length, device=tokens_SW.device) - first
    numbers_N = torch.full_like(context_N, number)
    file_finished(
        index, start + context_N - 1, context_N, index.prompt_S[slot].expand_as(context_N), numbers_N
    )


@triton.jit
def _mixed(h, token, MULTIPLIER: tl.constexpr):
    h = (h ^ token) * MULTIPLIER
    return h ^ (h >> 29)


@triton.jit
def _file_window(
    text_ptr,
    position,
    filed,
    known,
    h,
    value,
    table_ptr,
    mask,
    MAX_MATCH: tl.constexpr,
    MULTIPLIER: tl.constexpr,
):
    """Files each `position` of a text under its last 2, 4, 8 and 16 tokens; `known`: how many tokens there
    are up to it.
    """
    h = _mixed(h, tl.load(text_ptr + position, mask=filed, other=0).to(tl.int64), MULTIPLIER)
    for j in tl.static_range(1, MAX_MATCH):
        token = tl.load(text_ptr + position - j, mask=filed & (known > j), other=0).to(tl.int64)
        h = _mixed(h, token, MULTIPLIER)
        if (j & (j + 1)) == 0:
            tl.atomic_max(table_ptr + ((h >> 24) & mask), value, mask=filed & (known > j), sem="relaxed")


@triton.jit
def _file_running_kernel(
    slots_ptr,
    tokens_ptr,
    length_ptr,
    table_ptr,
    clock_ptr,
    prompt_ptr,
    filed_ptr,
    width,
    mask,
    MAX_MATCH: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    LOCATION_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, part): usually there are a few tokens for the first part, and for the others nothing; a
    new row has its prompt.
    """
    launch_next(PDL)
    wait_previous(PDL)
    slot = tl.load(slots_ptr + tl.program_id(0))
    first, stop = tl.load(filed_ptr + slot), tl.load(length_ptr + slot) - 1
    clock, prompt = tl.load(clock_ptr), tl.load(prompt_ptr + slot)
    for base in range(first + tl.program_id(1) * BLOCK, stop, SPLIT * BLOCK):
        position = base + tl.arange(0, BLOCK)
        value = (clock << LOCATION_BITS) | (slot * width + position)
        text_ptr = tokens_ptr + slot * width
        _file_window(
            text_ptr,
            position,
            position < stop,
            position + 1,
            prompt + position * 0,
            value,
            table_ptr,
            mask,
            MAX_MATCH,
            MULTIPLIER,
        )


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
    filed_ptr,
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
    launch_next(PDL)
    wait_previous(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    length = tl.load(length_ptr + slot)
    own_ptr = tokens_ptr + slot * width
    if row == 0:
        tl.store(clock_ptr, tl.load(clock_ptr) + 1)
    tl.store(filed_ptr + slot, tl.maximum(tl.load(filed_ptr + slot), length - 1))
    # Candidates: 0-3 from finished text under 2, 4, 8, 16 tokens, 4-7 from running text.
    c = tl.arange(0, 8)
    running = c >= 4
    h, hashes = tl.load(prompt_ptr + slot), tl.zeros((8,), tl.int64)
    for j in tl.static_range(MAX_MATCH):
        h = _mixed(h, tl.load(own_ptr + tl.maximum(length - 1 - j, 0)), MULTIPLIER)
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
    best = tl.max(key, axis=0)
    chosen = c == (best & 7)
    reach = tl.max(tl.where(chosen, follow, 0), axis=0)
    start = tl.max(tl.where(chosen, position, 0), axis=0) + 1
    chosen_slot = tl.max(tl.where(chosen, source, 0), axis=0)
    from_row = ahead * 0 + (best & 7) >= 4
    # Its own text goes on with what is being proposed: a loop is proposed as far as asked for.
    step = tl.where(from_row & (chosen_slot == slot), ahead % tl.maximum(reach, 1), ahead)
    said = (ahead * 0 + best >= 0) & (step < reach)
    out = tl.load(tokens_ptr + chosen_slot * width + start + step, mask=said & from_row, other=-1)
    out = tl.where(
        from_row, out, tl.load(bank_ptr + start + step, mask=said & (from_row == 0), other=-1).to(tl.int64)
    )
    tl.store(proposals_ptr + slot * num_proposals + ahead, out, mask=ahead < count)


@triton.jit(do_not_specialize=["slot", "first", "prompt", "length", "start", "number"])
def _bank_row_kernel(
    tokens_ptr,
    bank_ptr,
    table_ptr,
    prompt_ptr,
    slot,
    first,
    prompt,
    length,
    start,
    number,
    width,
    mask,
    MAX_MATCH: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    LOCATION_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next(PDL)
    wait_previous(PDL)
    position = first + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row_ptr = tokens_ptr + slot.to(tl.int64) * width
    token = tl.load(row_ptr + position, mask=position < length, other=-1)
    where = start + position - first
    tl.store(bank_ptr + where, token.to(tl.int32), mask=position <= length)
    filed = (position >= prompt - 1) & (position < length - 1)
    value = (number.to(tl.int64) << LOCATION_BITS) | where
    h = tl.load(prompt_ptr + slot.to(tl.int64)) + position * 0
    _file_window(
        row_ptr, position, filed, position - first + 1, h, value, table_ptr, mask, MAX_MATCH, MULTIPLIER
    )


_CONSTANTS = dict(MAX_MATCH=MAX_MATCH, MULTIPLIER=_MULTIPLIER, LOCATION_BITS=LOCATION_BITS)


def propose_triton(
    slots_R: torch.Tensor,
    tokens_SW: torch.Tensor,
    length_S: torch.Tensor,
    index: HistoryIndex,
    count: int,
    proposals_SK: torch.Tensor,
) -> None:
    """Two launches: every row files before any looks up, so who runs first does not matter."""
    rows, width = slots_R.shape[0], tokens_SW.shape[1]
    _file_running_kernel[(rows, _FILING_PARTS)](
        slots_R,
        tokens_SW,
        length_S,
        index.running_B,
        index.clock_1,
        index.prompt_S,
        index.filed_S,
        width,
        len(index.running_B) - 1,
        BLOCK=_FILED_AT_ONCE,
        SPLIT=_FILING_PARTS,
        **_CONSTANTS,
        **launch_options(num_warps=2),
    )
    _propose_kernel[(rows,)](
        slots_R,
        tokens_SW,
        length_S,
        index.bank_T,
        index.finished_B,
        index.running_B,
        index.oldest_1,
        index.clock_1,
        index.prompt_S,
        index.filed_S,
        proposals_SK,
        width,
        len(index.bank_T),
        len(index.finished_B) - 1,
        len(index.running_B) - 1,
        count,
        proposals_SK.shape[1],
        MIN_MATCH=MIN_MATCH,
        BLOCK_COUNT=next_power_of_2(count),
        **_CONSTANTS,
        **launch_options(num_warps=1),
    )


def bank_row_triton(
    tokens_SW: torch.Tensor,
    index: HistoryIndex,
    slot: int,
    first: int,
    prompt: int,
    length: int,
    start: int,
    number: int,
) -> None:
    _bank_row_kernel[(cdiv(length - first + 1, _BANKED_AT_ONCE),)](
        tokens_SW,
        index.bank_T,
        index.finished_B,
        index.prompt_S,
        slot,
        first,
        prompt,
        length,
        start,
        number,
        tokens_SW.shape[1],
        len(index.finished_B) - 1,
        BLOCK=_BANKED_AT_ONCE,
        **_CONSTANTS,
        **launch_options(num_warps=4),
    )


def propose_from_history(
    slots_R: torch.Tensor,
    tokens_SW: torch.Tensor,
    length_S: torch.Tensor,
    index: HistoryIndex,
    count: int,
    proposals_SK: torch.Tensor,
) -> None:
    """Files what the rows have gained, then writes up to `count` tokens for each; -1, which no policy
    samples, where there is nothing to say.
    """
    run = propose_triton if slots_R.is_cuda else propose_reference
    run(slots_R, tokens_SW, length_S, index, count, proposals_SK)


def bank_row(
    tokens_SW: torch.Tensor,
    index: HistoryIndex,
    slot: int,
    first: int,
    prompt: int,
    length: int,
    start: int,
    number: int,
) -> None:
    """Keeps tokens [first, length) of a row as entry `number` at `start` of the bank, END after it; files
    what follows its `prompt` tokens.
    """
    run = bank_row_triton if tokens_SW.is_cuda else bank_row_reference
    run(tokens_SW, index, slot, first, prompt, length, start, number)
