"""Moves cached tokens to other slots of the same rows, once the way through a tree is known.

    slots      L-1    L    L+1   L+2   L+3        path 0 ▶ 1 ▶ 4: what lies at L+3 belongs to L+1
    before      0     1     2     3     4
    after       0     1     4     .     .

A row's sources and targets overlap, so everything is read before anything is written. Rows share no slots
that move.
"""

import torch

from paceline.kernels.operation import cdiv, next_power_of_2, reference_of
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous

# Numbers of a token that one program moves.
CHUNK = 256


@triton.jit
def _move_kernel(storage_ptr, places, sizes, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Programs (row, layer's K or V, chunk of a token)."""
    launch_next(PDL)
    sources_ptr, targets_ptr = places
    num_slots, width, depth = sizes
    row, outer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    column = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    wait_previous(PDL)
    source = tl.load(sources_ptr + row * depth + d, mask=d < depth, other=-1)
    target = tl.load(targets_ptr + row * depth + d, mask=d < depth, other=-1)
    moves = ((source >= 0) & (target >= 0) & (source != target))[:, None] & (column < width)[None, :]
    base = storage_ptr + outer * num_slots * width
    moved = tl.load(base + source[:, None] * width + column[None, :], mask=moves, other=0)
    # The threads of a program store where others load.
    tl.debug_barrier()
    tl.store(base + target[:, None] * width + column[None, :], moved, mask=moves)


def move_slots_triton(storage_OSN, sources_RD, targets_RD):
    outer, num_slots, width = storage_OSN.shape
    num_rows, depth = sources_RD.shape
    _move_kernel[(num_rows, outer, cdiv(width, CHUNK))](
        storage_OSN,
        (sources_RD, targets_RD),
        (num_slots, width, depth),
        BLOCK_D=next_power_of_2(depth),
        CHUNK=CHUNK,
        **launch_options(num_warps=4),
    )


@reference_of(move_slots_triton)
def move_slots(storage_OSN: torch.Tensor, sources_RD: torch.Tensor, targets_RD: torch.Tensor) -> None:
    """Copies slot `sources_RD[r, d]` of every outer index to slot `targets_RD[r, d]`.

    Where either is -1 nothing moves. `storage_OSN` is contiguous, of integers: callers
    view other types as such.
    """
    moves_RD = (sources_RD >= 0) & (targets_RD >= 0) & (sources_RD != targets_RD)
    storage_OSN[:, targets_RD[moves_RD]] = storage_OSN[:, sources_RD[moves_RD]]
