"""Quantisers: weights in blocks of 128 x 128, into existing storage; activations in groups of 128 per row.

What a kernel before a product computes is mostly quantised there (norm.py, swiglu.py); `quantise_rows` is for
the rest.
"""

import torch
import torch.nn.functional as F

from paceline.kernels.fp8_format import (
    GROUP,
    BlockMatrix,
    QuantisedRows,
    power_of_two_scale,
    quantise_groups,
    scale_of,
    to_e4m3,
)
from paceline.kernels.triton_support import cdiv, launch_next, launch_options, tl, triton, wait_previous

# Groups of a row that one program quantises.
GROUPS_PER_PROGRAM = 8


def quantise_blocks_reference(weight: torch.Tensor, out: BlockMatrix, round_weight: bool = False) -> None:
    *leading, width, depth = weight.shape
    padded = F.pad(weight.float(), (0, -depth % GROUP, 0, -width % GROUP))
    # [..., blocks of N, 128, blocks of K, 128]
    blocks = padded.unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))
    scales = power_of_two_scale(blocks.abs().amax((-3, -1)))
    values = (blocks / scales[..., None, :, None]).flatten(-4, -3).flatten(-2, -1)[..., :width, :]
    out.values.copy_(to_e4m3(values))
    out.scales.copy_(scales)
    if out.wide is not None:
        out.wide.copy_(out.dequantise())
    if round_weight:
        weight.copy_(out.dequantise()[..., :depth])


def quantise_rows_reference(x_MK: torch.Tensor) -> QuantisedRows:
    num_rows, depth = x_MK.shape
    out = QuantisedRows.empty(num_rows, depth, x_MK.dtype, x_MK.device)
    groups_MGC = F.pad(x_MK.float(), (0, -depth % GROUP)).unflatten(1, (-1, GROUP))
    scales_MG = scale_of(groups_MGC.abs().amax(-1))
    out.values_MK[:num_rows] = to_e4m3(groups_MGC / scales_MG.unsqueeze(-1)).flatten(1)
    out.scales_GM[:, :num_rows] = scales_MG.t()
    return out


@triton.jit
def _quantise_blocks_kernel(
    weight_ptr, values_ptr, scales_ptr, N, K, PADDED_K, ROUND: tl.constexpr, PDL: tl.constexpr
):
    """One program per block; the first axis walks along K, so that neighbours read neighbouring memory.

    It never lets the next kernel begin early: a product loads its weights' scales before it waits for the
    kernel before it.
    """
    wait_previous(PDL)
    matrix = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * 128
    block = (matrix * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    rows = weight_ptr + (matrix * N + first) * K
    values = values_ptr + (matrix * N + first) * PADDED_K
    column = tl.program_id(0) * 128
    scale = scales_ptr + block
    quantise_block(rows, rows, values, scale, N - first, column, K, PADDED_K, COPY=False, ROUND=ROUND)


@triton.jit
def quantise_block(
    rows_ptr,
    copy_ptr,
    values_ptr,
    scale_ptr,
    num_rows,
    first_column,
    K,
    PADDED_K,
    COPY: tl.constexpr,
    ROUND: tl.constexpr = False,
):
    """Quantises one block, whose rows begin at `rows_ptr`; there may be fewer than 128, and fewer columns.

    With COPY it also writes them, as they are, from `copy_ptr` on; with ROUND what their quantised numbers
    stand for.
    """
    row = tl.arange(0, 128)
    column = first_column + tl.arange(0, 128)
    in_rows = (row < num_rows)[:, None]
    inside = in_rows & (column < K)[None, :]
    place = row[:, None] * K + column[None, :]
    x = tl.load(rows_ptr + place, mask=inside, other=0.0)
    if COPY:
        tl.store(copy_ptr + place, x, mask=inside)
    flat = tl.reshape(x.to(tl.float32), (1, 128 * 128))
    values, scale = quantise_groups(flat, POWER_OF_TWO=True)
    # A GPU's maximum ignores NaN, and the scale must show it.
    scale = tl.where(tl.max((flat != flat).to(tl.int32), axis=-1) > 0, float("nan"), scale)
    target = values_ptr + row[:, None] * PADDED_K + column[None, :]
    tl.store(target, tl.reshape(values, (128, 128)), mask=in_rows)
    if ROUND:
        rounded = tl.reshape(values.to(tl.float32) * scale[:, None], (128, 128))
        tl.store(copy_ptr + place, rounded.to(copy_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + tl.arange(0, 1), scale)


def quantise_blocks_triton(weight: torch.Tensor, out: BlockMatrix, round_weight: bool = False) -> None:
    *leading, width, depth = weight.shape
    grid = (cdiv(depth, GROUP), cdiv(width, GROUP), leading[0] if leading else 1)
    _quantise_blocks_kernel[grid](
        weight,
        out.values,
        out.scales,
        width,
        depth,
        out.values.shape[-1],
        ROUND=round_weight,
        **launch_options(num_warps=8),
    )


@triton.jit(do_not_specialize=["num_rows", "padded_rows"])
def _quantise_rows_kernel(
    x_ptr, values_ptr, scales_ptr, num_rows, padded_rows, K, PADDED_K, GROUPS: tl.constexpr, PDL: tl.constexpr
):
    """One program per row and GROUPS groups."""
    launch_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    wait_previous(PDL)
    x = tl.load(x_ptr + row * K + column, mask=column < K, other=0.0).to(tl.float32)
    values, scales = quantise_groups(x)
    store_groups(values, scales, values_ptr, scales_ptr, row, group, column, padded_rows, PADDED_K)


@triton.jit
def store_groups(values, scales, values_ptr, scales_ptr, row, group, column, padded_rows, PADDED_K):
    tl.store(values_ptr + row * PADDED_K + column, values, mask=column < PADDED_K)
    tl.store(scales_ptr + group.to(tl.int64) * padded_rows + row, scales, mask=group * 128 < PADDED_K)


def quantise_rows_triton(x_MK: torch.Tensor) -> QuantisedRows:
    num_rows, depth = x_MK.shape
    out = QuantisedRows.empty(num_rows, depth, x_MK.dtype, x_MK.device)
    padded_rows, padded_depth = out.values_MK.shape
    _quantise_rows_kernel[(num_rows, cdiv(padded_depth, GROUPS_PER_PROGRAM * GROUP))](
        x_MK,
        out.values_MK,
        out.scales_GM,
        num_rows,
        padded_rows,
        depth,
        padded_depth,
        GROUPS=GROUPS_PER_PROGRAM,
        **launch_options(num_warps=4),
    )
    return out


def quantise_blocks(weight: torch.Tensor, out: BlockMatrix, round_weight: bool = False) -> None:
    """Writes a contiguous weight `[N, K]` or `[X, N, K]` into `out`, whose address does not change.

    With `round_weight` the weight becomes what the quantised numbers stand for.
    """
    run = quantise_blocks_triton if weight.is_cuda else quantise_blocks_reference
    run(weight, out, round_weight)


def quantise_rows(x_MK: torch.Tensor) -> QuantisedRows:
    """Returns the rows in E4M3 with a scale for each group of columns."""
    return quantise_rows_triton(x_MK) if x_MK.is_cuda else quantise_rows_reference(x_MK)
