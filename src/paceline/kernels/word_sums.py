"""Two sums over words of 64 bits, plainly and weighted by place, in one pass; they wrap around.

Word i weighs (i % PERIOD + 1) (i // PIECE + 1). Additions modulo 2^64 may come in any order, so every device
and every way to cut the work up finds the same.
"""

import torch

from paceline.kernels.training_launch import plain_options
from paceline.kernels.triton_support import cdiv, tl, triton

# A prime, so that the period of the weights falls on no power of two.
PERIOD = 65_521
# Words after which the second factor rises; it bounds the memory that the reference takes for products.
PIECE = 64 * PERIOD
# Words that a program takes at a time; with more than so many programs each takes several.
BLOCK = 1024
MOST_PROGRAMS = 2048


def word_sums_reference(words_N: torch.Tensor) -> torch.Tensor:
    """The reference of `word_sums`."""
    places = torch.arange(min(len(words_N), PIECE), device=words_N.device) % PERIOD + 1
    sums_2 = torch.zeros(2, dtype=torch.int64, device=words_N.device)
    for start in range(0, len(words_N), PIECE):
        piece = words_N[start : start + PIECE]
        sums_2[0] += piece.sum()
        sums_2[1] += (piece * places[: len(piece)]).sum() * (start // PIECE + 1)
    return sums_2


@triton.jit(do_not_specialize=["count", "blocks"])
def _word_sums_kernel(
    words_ptr, out_ptr, count, blocks, PERIOD: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program takes `blocks` blocks of words in a row and leaves its two sums."""
    first = tl.program_id(0).to(tl.int64) * blocks * BLOCK
    offset = tl.arange(0, BLOCK).to(tl.int64)
    plain = tl.zeros((BLOCK,), tl.int64)
    weighted = tl.zeros((BLOCK,), tl.int64)
    for block in range(blocks):
        start = first + block * BLOCK
        word = tl.load(words_ptr + start + offset, mask=start + offset < count, other=0)
        # A block is shorter than a period, so a place wraps around once at most.
        place = start % PERIOD + offset
        place = tl.where(place >= PERIOD, place - PERIOD, place) + 1
        factor = start // PIECE + tl.where(start % PIECE + offset >= PIECE, 2, 1)
        plain += word
        weighted += word * (place * factor)
    out = out_ptr + tl.program_id(0) * 2
    tl.store(out, tl.sum(plain, axis=0))
    tl.store(out + 1, tl.sum(weighted, axis=0))


def word_sums_triton(words_N: torch.Tensor) -> torch.Tensor:
    """Launches `word_sums`'s kernel."""
    blocks = cdiv(cdiv(len(words_N), BLOCK), MOST_PROGRAMS)
    programs = cdiv(len(words_N), BLOCK * blocks)
    partial_P2 = torch.empty(programs, 2, dtype=torch.int64, device=words_N.device)
    _word_sums_kernel[(programs,)](
        words_N,
        partial_P2,
        len(words_N),
        blocks,
        PERIOD=PERIOD,
        PIECE=PIECE,
        BLOCK=BLOCK,
        **plain_options(num_warps=4),
    )
    return partial_P2.sum(0)


def word_sums(words_N: torch.Tensor) -> torch.Tensor:
    """Returns both sums of contiguous int64 words, on their device."""
    return word_sums_triton(words_N) if words_N.is_cuda and len(words_N) else word_sums_reference(words_N)
