"""An index of what has been written: where have the last tokens of a row been seen before under its prompt?

Every position that has a successor is indexed under its last 2, 4, 8 and 16 tokens, each hashed together with
the prompt:

    finished text    ... -1 | p p | a b c d e | -1 ...      bank_T: entry after entry, the oldest overwritten
    running text     p p a b c |                            the rows themselves

    bucket of hash(prompt, b, c)  ->  position of `c`       the newest occurrence wins the bucket

There is a table for finished text and one for running text, so that running text cannot displace finished
text. A bucket may be wrong or long overwritten, and nothing is ever deleted: `history_lookup.py`, which
proposes what followed, compares the text itself. A row that has run without this drafter is indexed when it
next proposes.

Everything is integers and maxima: the same on every device, and in whatever order programs run. Shape
letters: S slots, R rows of a batch, W row width, M tokens of a window, L lengths, B buckets, T bank tokens.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from paceline.kernels.noise import Array
from paceline.kernels.operation import cdiv, next_power_of_2, reference_of
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous

# Tokens compared at most; a longer match counts as this long.
MAX_MATCH = 16
# Tokens that must match; one equal token says too little.
MIN_MATCH = 2
# Numbers of tokens under whose hash a position is indexed.
LENGTHS = (2, 4, 8, 16)
BACK = np.arange(MAX_MATCH)
# Stands after each entry of the bank; no token has this id.
END = -1
# Low bits of a table's value, which say where; the bits above say when, so that what is newer is larger.
LOCATION_BITS = 32
# 2^64 over the golden ratio, as a signed number.
MULTIPLIER = -7046029254386353131
# Positions that one program indexes at a time, and programs per row.
_POSITIONS_AT_ONCE = 64
_PROGRAMS_PER_ROW = 4
# Tokens of a finished row that one program copies and indexes.
_BANKED_AT_ONCE = 256
_MULTIPLIER = tl.constexpr(MULTIPLIER)
_MAX_MATCH = tl.constexpr(MAX_MATCH)
_LOCATION_BITS = tl.constexpr(LOCATION_BITS)


class HistoryIndex(NamedTuple):
    """The index's tensors. A table's value is (when, where), 0 is empty; table sizes are powers of 2."""

    # The text of finished responses, int32.
    bank_T: torch.Tensor
    # Finished text. When: the entry's number; where: its position in the bank.
    finished_B: torch.Tensor
    # Running text. When: `clock_1`; where: slot * width + position.
    running_B: torch.Tensor
    # The number of the oldest entry that still exists.
    oldest_1: torch.Tensor
    # Steps that were proposed for.
    clock_1: torch.Tensor
    # The hash of each row's prompt.
    prompt_S: torch.Tensor
    # Leading tokens of each row that are in the table.
    indexed_S: torch.Tensor

    @classmethod
    def empty(
        cls, slots: int, bank_tokens: int, running_tokens: int, max_buckets: int, device: torch.device
    ) -> "HistoryIndex":
        """Returns an empty index, with about two buckets for each token.

        A token could use up to four, but siblings write much alike, and any one of them finds it.
        """

        def zeros(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        def buckets(tokens: int) -> int:
            return min(max_buckets, next_power_of_2(2 * tokens + 1) // 2)

        return cls(
            bank_T=zeros(bank_tokens, torch.int32),
            finished_B=zeros(buckets(bank_tokens)),
            running_B=zeros(buckets(running_tokens)),
            oldest_1=zeros(1),
            clock_1=zeros(1) + 1,
            prompt_S=zeros(slots),
            indexed_S=zeros(slots),
        )


def window_hashes(window_XM: Array, prompt_X: Array) -> Array:
    """Returns the hashes of the last 2, 4, 8 and 16 tokens, `[..., L]`; a window has the newest first."""
    hashes = list(_hashes(window_XM, prompt_X))
    return np.stack(hashes, -1) if isinstance(window_XM, np.ndarray) else torch.stack(hashes, -1)


def _hashes(window_XM: Array, h: Array) -> Iterator[Array]:
    for j in range(MAX_MATCH):
        h = (h ^ window_XM[..., j]) * MULTIPLIER
        h = h ^ (h >> 29)
        if j + 1 in LENGTHS:
            yield h


def buckets_of(hashes: Array, table_B: Array) -> Array:
    """Returns the bucket of each hash in a table."""
    return (hashes >> 24) & (len(table_B) - 1)


def index_running_reference(
    slots_R: torch.Tensor, tokens_SW: torch.Tensor, length_S: torch.Tensor, index: HistoryIndex
) -> None:
    """Indexes what the rows have gained since they were last indexed.

    In numpy, as all that a CPU does at each step for the few rows of a rollout: its operations cost a
    fraction of torch's there.
    """
    slots, tokens, indexed = slots_R.numpy(), tokens_SW.numpy(), index.indexed_S.numpy()
    first_R = indexed[slots]
    # The last token has nothing after it yet.
    stop_R = length_S.numpy()[slots] - 1
    span = int((stop_R - first_R).max())
    if span <= 0:
        return
    position_RN = first_R[:, None] + np.arange(span)
    window_RNM = np.minimum(np.maximum(position_RN[..., None] - BACK, 0), tokens.shape[1] - 1)
    hashes_RNL = window_hashes(
        tokens[slots[:, None, None], window_RNM], index.prompt_S.numpy()[slots][:, None]
    )
    when_where_RN = (int(index.clock_1) << LOCATION_BITS) | (slots[:, None] * tokens.shape[1] + position_RN)
    # A position with fewer tokens than a length is not indexed under that length.
    inserted_RNL = (position_RN < stop_R[:, None])[..., None] & (position_RN[..., None] + 1 >= LENGTHS)
    values_RNL = np.where(inserted_RNL, when_where_RN[..., None], 0)
    running_B = index.running_B.numpy()
    np.maximum.at(running_B, buckets_of(hashes_RNL, running_B).ravel(), values_RNL.ravel())
    indexed[slots] = np.maximum(first_R, stop_R)


def index_finished(
    index: HistoryIndex,
    positions_N: torch.Tensor,
    context_N: torch.Tensor,
    prompt_N: torch.Tensor,
    number_N: torch.Tensor,
) -> None:
    """Indexes positions of the bank; `context_N` counts the tokens of its entry up to and including each."""
    device = positions_N.device
    back_M = torch.arange(MAX_MATCH, device=device)
    window_NM = index.bank_T[(positions_N.unsqueeze(1) - back_M).clamp(min=0)].long()
    # A position with fewer tokens than a length is not indexed under that length.
    known_NL = context_N.unsqueeze(1) >= torch.tensor(LENGTHS, device=device)
    values_NL = torch.where(known_NL, ((number_N << LOCATION_BITS) | positions_N).unsqueeze(1), 0)
    buckets_NL = buckets_of(window_hashes(window_NM, prompt_N), index.finished_B)
    index.finished_B.scatter_reduce_(0, buckets_NL.flatten(), values_NL.flatten(), "amax")


@triton.jit
def mix_token(h, token):
    """Returns a running hash with one more token in it."""
    h = (h ^ token) * _MULTIPLIER
    return h ^ (h >> 29)


@triton.jit
def _insert_window(text_ptr, position, inserted, known, h, value, table_ptr, mask):
    """Indexes those of `position` that are `inserted` under their last 2, 4, 8 and 16 tokens.

    `known` counts the tokens up to and including each position.
    """
    h = mix_token(h, tl.load(text_ptr + position, mask=inserted, other=0).to(tl.int64))
    for j in tl.static_range(1, _MAX_MATCH):
        token = tl.load(text_ptr + position - j, mask=inserted & (known > j), other=0).to(tl.int64)
        h = mix_token(h, token)
        if (j & (j + 1)) == 0:
            tl.atomic_max(table_ptr + ((h >> 24) & mask), value, mask=inserted & (known > j), sem="relaxed")


@triton.jit
def _index_running_kernel(
    text, index, width, mask, BLOCK: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr
):
    """Program (row, part): usually only the first part has tokens, a few; a new row has its whole prompt."""
    launch_next(PDL)
    wait_previous(PDL)
    slots_ptr, tokens_ptr, length_ptr = text
    slot = tl.load(slots_ptr + tl.program_id(0))
    first, stop = tl.load(index.indexed_S + slot), tl.load(length_ptr + slot) - 1
    clock, prompt = tl.load(index.clock_1), tl.load(index.prompt_S + slot)
    for base in range(first + tl.program_id(1) * BLOCK, stop, SPLIT * BLOCK):
        position = base + tl.arange(0, BLOCK)
        value = (clock << _LOCATION_BITS) | (slot * width + position)
        h = prompt + position * 0
        row_ptr = tokens_ptr + slot * width
        _insert_window(row_ptr, position, position < stop, position + 1, h, value, index.running_B, mask)


@triton.jit(do_not_specialize=["slot", "first", "prompt", "length", "start", "number"])
def _bank_row_kernel(
    tokens_ptr,
    index,
    slot,
    first,
    prompt,
    length,
    start,
    number,
    width,
    mask,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (part of the row): copies its tokens into the bank and indexes those of the response."""
    launch_next(PDL)
    wait_previous(PDL)
    position = first + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row_ptr = tokens_ptr + slot.to(tl.int64) * width
    token = tl.load(row_ptr + position, mask=position < length, other=-1)
    where = start + position - first
    tl.store(index.bank_T + where, token.to(tl.int32), mask=position <= length)
    inserted = (position >= prompt - 1) & (position < length - 1)
    value = (number.to(tl.int64) << _LOCATION_BITS) | where
    h = tl.load(index.prompt_S + slot.to(tl.int64)) + position * 0
    _insert_window(row_ptr, position, inserted, position - first + 1, h, value, index.finished_B, mask)


def index_running_triton(slots_R, tokens_SW, length_S, index):
    """Launches `index_running_reference`'s kernel; `indexed_S` is left to the lookup, which runs next."""
    _index_running_kernel[(slots_R.shape[0], _PROGRAMS_PER_ROW)](
        (slots_R, tokens_SW, length_S),
        index,
        tokens_SW.shape[1],
        len(index.running_B) - 1,
        BLOCK=_POSITIONS_AT_ONCE,
        SPLIT=_PROGRAMS_PER_ROW,
        **launch_options(num_warps=2),
    )


def bank_row_triton(tokens_SW, index, *entry):
    _, first, _, length, _, _ = entry
    _bank_row_kernel[(cdiv(length - first + 1, _BANKED_AT_ONCE),)](
        tokens_SW,
        index,
        *entry,
        tokens_SW.shape[1],
        len(index.finished_B) - 1,
        BLOCK=_BANKED_AT_ONCE,
        **launch_options(num_warps=4),
    )


@reference_of(bank_row_triton)
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
    """Keeps tokens [first, length) of a row as entry `number` at `start` of the bank, with END after it.

    What follows the row's `prompt` tokens is indexed.
    """
    index.bank_T[start : start + length - first] = tokens_SW[slot, first:length]
    index.bank_T[start + length - first] = END
    context_N = torch.arange(prompt, length, device=tokens_SW.device) - first
    numbers_N = torch.full_like(context_N, number)
    index_finished(
        index, start + context_N - 1, context_N, index.prompt_S[slot].expand_as(context_N), numbers_N
    )
