"""Two sums over words of 64 bits, plainly and weighted by place, in one pass; they wrap around.

Word i weighs (i % PERIOD + 1) (i // PIECE + 1). Additions modulo 2^64 may come in any order, so every device
and every way to cut the work up finds the same. Pieces of memory that lie anywhere on a GPU are summed in one
launch: a model has hundreds, and a launch for each would take longer than reading them. Their addresses
are sent to the GPU once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from paceline.kernels.training_launch import plain_options
from paceline.kernels.triton_support import tl, triton

# A prime, so that the period of the weights falls on no power of two.
PERIOD = 65_521
# Words after which the second factor rises.
PIECE = 64 * PERIOD
# Words that a program takes at a time, and how often it does.
BLOCK = 1024
BLOCKS = 64


def word_sums_reference(words_N: torch.Tensor) -> torch.Tensor:
    """The reference of `WordSums`. A CPU runs this: words of the same weight are added up first."""
    sums_2 = torch.zeros(2, dtype=torch.int64, device=words_N.device)
    period = max(1, min(PERIOD, len(words_N)))
    weight_P = torch.arange(1, period + 1, device=words_N.device)
    for number, piece in enumerate(words_N.split(PIECE)):
        whole = len(piece) // period * period
        total_P = piece[:whole].view(-1, period).sum(0)
        total_P[: len(piece) - whole] += piece[whole:]
        sums_2[0] += total_P.sum()
        sums_2[1] += (total_P * weight_P).sum() * (number + 1)
    return sums_2


@triton.jit
def _word_sums_kernel(
    table, out_ptr, PERIOD: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """Each program takes BLOCKS blocks of its owner's words, from `first` on, and leaves their two sums."""
    program = tl.program_id(0)
    owner = tl.load(table.owner_P + program)
    words_ptr = tl.load(table.address_N + owner).to(tl.pointer_type(tl.int64))
    count = tl.load(table.count_N + owner)
    first = tl.load(table.first_P + program)
    offset = tl.arange(0, BLOCK).to(tl.int64)
    plain = tl.zeros((BLOCK,), tl.int64)
    weighted = tl.zeros((BLOCK,), tl.int64)
    for block in range(BLOCKS):
        start = first + block * BLOCK
        word = tl.load(words_ptr + start + offset, mask=start + offset < count, other=0)
        # A block is shorter than a period, so a place wraps around once at most.
        place = start % PERIOD + offset
        place = tl.where(place >= PERIOD, place - PERIOD, place) + 1
        factor = start // PIECE + tl.where(start % PIECE + offset >= PIECE, 2, 1)
        plain += word
        weighted += word * (place * factor)
    tl.store(out_ptr + program * 2, tl.sum(plain, axis=0))
    tl.store(out_ptr + program * 2 + 1, tl.sum(weighted, axis=0))


class WordTable(NamedTuple):
    """Where words lie on a GPU, so many at each address, and which of them each program sums."""

    address_N: torch.Tensor
    count_N: torch.Tensor
    owner_P: torch.Tensor
    first_P: torch.Tensor

    @staticmethod
    def of(addresses: Sequence[int], counts: Sequence[int], device: torch.device) -> "WordTable":
        """Deals the words out to programs; the table lies on the device."""
        count = np.array(counts, dtype=np.int64)
        programs = -(-count // (BLOCK * BLOCKS))
        owner = np.repeat(np.arange(len(count)), programs)
        first = (np.arange(len(owner)) - np.repeat(programs.cumsum() - programs, programs)) * (BLOCK * BLOCKS)
        arrays = (np.array(addresses, dtype=np.int64), count, owner, first)
        return WordTable(*(torch.from_numpy(array).to(device) for array in arrays))


def word_sums_triton(table: WordTable) -> torch.Tensor:
    sums_N2 = table.count_N.new_zeros(len(table.count_N), 2)
    programs = len(table.owner_P)
    if not programs:
        return sums_N2
    partial_P2 = table.count_N.new_empty(programs, 2)
    options = dict(PERIOD=PERIOD, PIECE=PIECE, BLOCK=BLOCK, BLOCKS=BLOCKS, **plain_options(num_warps=4))
    _word_sums_kernel[(programs,)](table, partial_P2, **options)
    return sums_N2.index_add_(0, table.owner_P, partial_P2)


class WordSums:
    """Both sums of each of some pieces of contiguous int64 words of one device, as often as is asked.

    The pieces are kept, so they stay where they lie.
    """

    def __init__(self, pieces: Sequence[torch.Tensor]) -> None:
        self.pieces = pieces
        self.table: WordTable | None = None
        if pieces[0].is_cuda:
            addresses = [words_N.data_ptr() for words_N in pieces]
            self.table = WordTable.of(addresses, [len(words_N) for words_N in pieces], pieces[0].device)

    def compute(self) -> torch.Tensor:
        """Returns the sums of what the pieces hold now, `[N, 2]`, on their device."""
        if self.table is not None:
            return word_sums_triton(self.table)
        return torch.stack([word_sums_reference(words_N) for words_N in self.pieces])
