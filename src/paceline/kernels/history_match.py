"""Where have the last tokens of a row been seen before, and what followed?

For each row every position of several source sequences is a candidate; the longest match of the row's last tokens wins, then
the one that has more to propose, then the later source in its list, then the later position:

    row       ... x a b c |                last tokens: c, b, a, x, ...
    source    ... y a b c d e f ...        match of length 3 ending at c: proposes d e f

A source is another resident row (its own included) or an entry of a bank of finished sequences. It is a scan, not an index:
the tokens of a group are a few kilobytes, and reading them all costs the GPU microseconds.
"""

import torch

from paceline.kernels.triton_support import launch_next, launch_options, next_power_of_2, tl, triton, wait_previous

MAX_MATCH = 16  # tokens compared; a longer match counts as this long
NO_SOURCE = -1
SCAN = 1024

# A candidate as one integer: match length, tokens that follow (up to those asked for), rank of the source, position.
_SOURCE_SHIFT, _FOLLOW_SHIFT, _MATCH_SHIFT = 24, 36, 40


def bank_source(entry: int) -> int:
    """How a bank entry is written in a list of sources; resident rows are written as their slot."""
    return -2 - entry


def propose_from_history_reference(
    slots_R: torch.Tensor,
    tokens_SW: torch.Tensor,
    length_S: torch.Tensor,
    bank_NW: torch.Tensor,
    bank_length_N: torch.Tensor,
    sources_SC: torch.Tensor,
    min_match: int,
    count: int,
    proposals_SK: torch.Tensor,
) -> None:
    for slot in slots_R.tolist():
        length = int(length_S[slot])
        own = tokens_SW[slot, :length]
        suffix = own.flip(0)[:MAX_MATCH]
        best_key, best = -1, None
        for rank, source in enumerate(sources_SC[slot].tolist()):
            if source == NO_SOURCE:
                continue
            sequence = tokens_SW[source, : length_S[source]] if source >= 0 else bank_NW[-2 - source, : bank_length_N[-2 - source]]
            matched = _match_lengths(sequence, suffix)[:-1]  # the last position has nothing after it
            if len(matched) == 0 or int(matched.max()) < min_match:
                continue
            position_N = torch.arange(len(matched), device=matched.device)
            follow_N = (len(sequence) - 1 - position_N).clamp(max=count)
            key_N = (matched << _MATCH_SHIFT) | (follow_N << _FOLLOW_SHIFT) | (rank << _SOURCE_SHIFT) | position_N
            position = int(key_N.argmax())
            if int(key_N[position]) > best_key:
                best_key, best = int(key_N[position]), sequence[position + 1 : position + 1 + count]
        proposals_SK[slot, :count] = NO_SOURCE
        if best is not None:
            proposals_SK[slot, : len(best)] = best


def _match_lengths(sequence: torch.Tensor, suffix: torch.Tensor) -> torch.Tensor:
    """For each position: how many tokens ending there equal the suffix's last tokens (given newest first)."""
    alive = torch.ones(len(sequence), dtype=torch.bool)
    matched = torch.zeros(len(sequence), dtype=torch.int64)
    for back, token in enumerate(suffix.tolist()):
        equal = torch.zeros_like(alive)
        equal[back:] = sequence[: len(sequence) - back] == token
        alive &= equal
        if not alive.any():
            break
        matched += alive
    return matched


@triton.jit
def _scan_kernel(
    slots_ptr, tokens_ptr, length_ptr, bank_ptr, bank_length_ptr, sources_ptr, best_ptr, width, bank_width, num_sources, min_match, count,
    MAX_MATCH: tl.constexpr, SCAN: tl.constexpr,
    SOURCE_SHIFT: tl.constexpr, FOLLOW_SHIFT: tl.constexpr, MATCH_SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, source): the best candidate of this source as one integer, -1 if none."""
    launch_next(PDL)
    wait_previous(PDL)
    row, rank = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    source = tl.load(sources_ptr + slot * num_sources + rank).to(tl.int64)
    own_length = tl.load(length_ptr + slot)
    own_ptr = tokens_ptr + slot * width
    is_bank = source < -1
    sequence_ptr = tokens_ptr + tl.maximum(source, 0) * width
    length = tl.load(length_ptr + tl.maximum(source, 0))
    if is_bank:
        sequence_ptr = bank_ptr + (-2 - source) * bank_width
        length = tl.load(bank_length_ptr + (-2 - source))
    if source == -1:
        length = length * 0
    best = tl.full((), -1, tl.int64)
    for start in range(0, length - 1, SCAN):
        position = start + tl.arange(0, SCAN)
        matched = tl.zeros((SCAN,), tl.int32)
        for back in tl.static_range(MAX_MATCH):
            wanted = tl.load(own_ptr + tl.maximum(own_length - 1 - back, 0))
            token = tl.load(sequence_ptr + position - back, mask=(position < length) & (position >= back), other=-2)
            alive = (position < length - 1) & (matched == back) & (token == wanted) & (own_length + position * 0 > back)
            matched += alive.to(tl.int32)
        follow = tl.minimum(length - 1 - position, count).to(tl.int64)
        key = (matched.to(tl.int64) << MATCH_SHIFT) | (follow << FOLLOW_SHIFT) | (rank.to(tl.int64) << SOURCE_SHIFT) | position.to(tl.int64)
        key = tl.where(matched >= min_match, key, -1)
        best = tl.maximum(best, tl.max(key, axis=0))
    tl.store(best_ptr + row * num_sources + rank, best)


@triton.jit
def _propose_kernel(
    slots_ptr, tokens_ptr, length_ptr, bank_ptr, bank_length_ptr, sources_ptr, best_ptr, proposals_ptr,
    width, bank_width, num_sources, count, num_proposals,
    BLOCK_SOURCES: tl.constexpr, BLOCK_COUNT: tl.constexpr,
    SOURCE_SHIFT: tl.constexpr, FOLLOW_SHIFT: tl.constexpr, MATCH_SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    wait_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    rank = tl.arange(0, BLOCK_SOURCES)
    best = tl.max(tl.load(best_ptr + row * num_sources + rank, mask=rank < num_sources, other=-1), axis=0)
    i = tl.arange(0, BLOCK_COUNT)
    out = tl.full((BLOCK_COUNT,), -1, tl.int64)
    if best >= 0:
        chosen = (best >> SOURCE_SHIFT) & ((1 << (FOLLOW_SHIFT - SOURCE_SHIFT)) - 1)
        position = best & ((1 << SOURCE_SHIFT) - 1)
        source = tl.load(sources_ptr + slot * num_sources + chosen).to(tl.int64)
        if source >= 0:
            sequence_ptr, length = tokens_ptr + source * width, tl.load(length_ptr + source)
        else:
            sequence_ptr, length = bank_ptr + (-2 - source) * bank_width, tl.load(bank_length_ptr + (-2 - source))
        out = tl.load(sequence_ptr + position + 1 + i, mask=position + 1 + i < length, other=-1)
    tl.store(proposals_ptr + slot * num_proposals + i, out, mask=i < count)


def propose_from_history_triton(
    slots_R, tokens_SW, length_S, bank_NW, bank_length_N, sources_SC, min_match, count, proposals_SK
) -> None:  # fmt: skip
    num_rows, num_sources = slots_R.shape[0], sources_SC.shape[1]
    best = torch.empty(num_rows, num_sources, dtype=torch.int64, device=slots_R.device)
    shifts = dict(SOURCE_SHIFT=_SOURCE_SHIFT, FOLLOW_SHIFT=_FOLLOW_SHIFT, MATCH_SHIFT=_MATCH_SHIFT)
    _scan_kernel[(num_rows, num_sources)](
        slots_R, tokens_SW, length_S, bank_NW, bank_length_N, sources_SC, best, tokens_SW.shape[1], bank_NW.shape[1], num_sources, min_match, count,
        MAX_MATCH=MAX_MATCH, SCAN=SCAN, **shifts, **launch_options(num_warps=4),
    )  # fmt: skip
    _propose_kernel[(num_rows,)](
        slots_R, tokens_SW, length_S, bank_NW, bank_length_N, sources_SC, best, proposals_SK, tokens_SW.shape[1], bank_NW.shape[1],
        num_sources, count, proposals_SK.shape[1], BLOCK_SOURCES=next_power_of_2(num_sources), BLOCK_COUNT=next_power_of_2(count),
        **shifts, **launch_options(num_warps=1),
    )  # fmt: skip


def propose_from_history(
    slots_R: torch.Tensor,
    tokens_SW: torch.Tensor,
    length_S: torch.Tensor,
    bank_NW: torch.Tensor,
    bank_length_N: torch.Tensor,
    sources_SC: torch.Tensor,
    min_match: int,
    count: int,
    proposals_SK: torch.Tensor,
) -> None:
    """Writes up to `count` tokens for each row; -1, which no policy samples, where history has nothing to say."""
    run = propose_from_history_triton if slots_R.is_cuda else propose_from_history_reference
    run(slots_R, tokens_SW, length_S, bank_NW, bank_length_N, sources_SC, min_match, count, proposals_SK)
