"""`fp8_linear`: quantised rows x [M, K] times a block-quantised weight [N, K] transposed.

    out[m, n] = sum over groups g of 128 columns, in order
                (x[m, g] . w[n, g]) * (x_scale[g, m] * w_scale[n / 128, g])

The product of a group runs on the tensor core in E4M3 and is added to a float32 accumulator with its scales:
the tensor core itself keeps only about 14 bits of a sum, which 128 terms leave room for (arXiv 2412.19437,
section 3.3.2).

The weight is the tensor core's left operand, 64 or 128 of its rows a tile, and the rows of x are the right
one, as few as 16: a Hopper wgmma takes no fewer than 64 left rows, and anything else runs E4M3 as float16. So
decoding, verification and prefill use one instruction, and a row's bits do not depend on how many rows ran
with it.

Up to 128 rows the time is that of reading the weights. Narrow ones have too few tiles to occupy the GPU, so
their depth is cut into parts, a number that depends on the weight's shape alone. The parts stay apart,
`[parts, M, N]` in float32, and the kernel that follows (norm, RoPE) adds them up in order. Asking L2 for
weights before x is there was tried and did not pay.

From CUBLAS_ROWS on torch's scaled matmul is faster, and `deterministic=False` takes it.
"""

from dataclasses import dataclass

import torch

from paceline.kernels.fp8_format import GROUP, BlockMatrix, QuantisedRows
from paceline.kernels.row_tiles import multiply_rows
from paceline.kernels.triton_support import (
    TensorDescriptor,
    cdiv,
    launch_next,
    launch_options,
    tl,
    triton,
    wait_previous,
)

# Rows from which on torch's scaled matmul is faster.
CUBLAS_ROWS = 129
# Row tiles that programs walk before the next column tile, so that both operands stay in L2.
ROW_TILES_TOGETHER = 16


@dataclass(frozen=True)
class Fp8Tile:
    """Rows of x by rows of weight, and how a program runs; none of it changes a bit of the result."""

    rows: int
    cols: int
    warps: int
    stages: int
    tma: bool = False

    def options(self) -> dict:
        return launch_options(self.warps, self.stages, stage_bytes=(self.rows + self.cols) * GROUP)


def fp8_linear_reference(
    x: QuantisedRows, weight: BlockMatrix, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Multiplies what the scales stand for in float32; rows run in tiles, as in linear.py."""
    weight_NK = weight.dequantise() if weight.wide is None else weight.wide
    return multiply_rows(x.dequantise(), weight_NK)[: x.num_rows].to(out_dtype or x.dtype)


def choose_parts(width: int, depth: int) -> int:
    """Returns how many parts the depth is cut into.

    That depends on the weight's shape alone, since it decides the order of the sum.
    """
    if depth < 4096 or width > 8192:
        return 1
    return 4 if width <= 4096 else 2


def choose_fp8_tile(num_rows: int, width: int) -> Fp8Tile:
    """Returns the tile that was fastest on an H200 with the Qwen3-8B shapes.

    Those are N = 4096 (o, down), 6144 (qkv), 24576 (gate-up).
    """
    narrow = width <= 4096
    if num_rows <= 32:
        return Fp8Tile(16 if num_rows <= 16 else 32, 64, 4, 8 if narrow else 6)
    if num_rows <= 64:
        return Fp8Tile(64, 64, 4, 6 if narrow else 4)
    return Fp8Tile(128, 64, 4, 3 if num_rows <= 128 else 4, tma=True)


@triton.jit(do_not_specialize=["M", "padded_rows"])
def _fp8_linear_kernel(
    x_ptr,
    weight_ptr,
    x_desc,
    weight_desc,
    x_scales_ptr,
    weight_scales_ptr,
    out_ptr,
    M,
    N,
    K,
    padded_rows,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TMA: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (row and column tile, part of the depth)."""
    launch_next(PDL)
    row_tiles, col_tiles = tl.cdiv(M, ROWS), tl.cdiv(N, COLS)
    band = tl.program_id(0) // (TOGETHER * col_tiles)
    band_rows = tl.minimum(row_tiles - band * TOGETHER, TOGETHER)
    row_tile = band * TOGETHER + tl.program_id(0) % band_rows
    col_tile = (tl.program_id(0) % (TOGETHER * col_tiles)) // band_rows
    row = row_tile * ROWS + tl.arange(0, ROWS)
    col = col_tile * COLS + tl.arange(0, COLS)
    groups = K // 128
    part_groups = tl.cdiv(groups, tl.num_programs(1))
    first = tl.program_id(1) * part_groups
    last = tl.minimum(first + part_groups, groups)
    k = tl.arange(0, 128)
    weight_ptrs = weight_ptr + tl.minimum(col, N - 1).to(tl.int64)[:, None] * K + first * 128 + k[None, :]
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * K + first * 128 + k[None, :]
    x_scale_ptrs = x_scales_ptr + row
    weight_scale_ptr = weight_scales_ptr + col_tile * COLS // 128 * groups
    weight_scale = tl.load(weight_scale_ptr + first)
    wait_previous(PDL)
    # Scales are loaded one group ahead: the compiler pipelines only what feeds the tensor core.
    x_scale = tl.load(x_scale_ptrs + first * padded_rows, mask=row < M, other=0.0)
    acc = tl.zeros((COLS, ROWS), tl.float32)
    for group in range(first, last):
        scale = x_scale * weight_scale
        following = tl.minimum(group + 1, last - 1)
        x_scale = tl.load(x_scale_ptrs + following * padded_rows, mask=row < M, other=0.0)
        weight_scale = tl.load(weight_scale_ptr + following)
        if TMA:
            weight = weight_desc.load([col_tile * COLS, group * 128])
            x = x_desc.load([row_tile * ROWS, group * 128])
        else:
            weight = tl.load(weight_ptrs)
            x = tl.load(x_ptrs, mask=(row < M)[:, None], other=0.0)
            weight_ptrs += 128
            x_ptrs += 128
        acc += tl.dot(weight, tl.trans(x)) * scale[None, :]
    out = out_ptr + tl.program_id(1).to(tl.int64) * M * N + row.to(tl.int64)[:, None] * N + col[None, :]
    tl.store(out, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=(row < M)[:, None] & (col < N)[None, :])


def fp8_linear_triton(
    x: QuantisedRows,
    weight: BlockMatrix,
    tile: Fp8Tile | None = None,
    parts: int = 1,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns `[M, N]`, or `[parts, M, N]` in float32 whose sum over the parts in order is the product."""
    num_rows = x.num_rows
    depth = x.values_MK.shape[1]
    width = weight.values.shape[0]
    tile = tile or choose_fp8_tile(num_rows, width)
    shape = (num_rows, width) if parts == 1 else (parts, num_rows, width)
    dtype = torch.float32 if parts > 1 else out_dtype or x.dtype
    out = torch.empty(shape, dtype=dtype, device=x.values_MK.device)
    x_desc = weight_desc = None
    if tile.tma:
        x_desc = TensorDescriptor(x.values_MK, [num_rows, depth], [depth, 1], [tile.rows, GROUP])
        weight_desc = TensorDescriptor(weight.values, [width, depth], [depth, 1], [tile.cols, GROUP])
    _fp8_linear_kernel[(cdiv(num_rows, tile.rows) * cdiv(width, tile.cols), parts)](
        x.values_MK,
        weight.values,
        x_desc,
        weight_desc,
        x.scales_GM,
        weight.scales,
        out,
        num_rows,
        width,
        depth,
        x.scales_GM.shape[1],
        ROWS=tile.rows,
        COLS=tile.cols,
        TMA=tile.tma,
        TOGETHER=ROW_TILES_TOGETHER,
        **tile.options(),
    )
    return out


def fp8_linear_cublas(x: QuantisedRows, weight: BlockMatrix) -> torch.Tensor:
    """Returns the product by torch's scaled matmul, whose bits depend on the number of rows."""
    out = torch._scaled_mm(
        x.values_MK, weight.values.t(), x.scales_GM.t(), weight.scales.t(), out_dtype=x.dtype
    )
    return out[: x.num_rows]


def fp8_linear(
    x: QuantisedRows,
    weight: BlockMatrix,
    deterministic: bool = False,
    keep_parts: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns x times weight transposed, `[M, N]` in x's type, or in `out_dtype`.

    With `keep_parts` and no `out_dtype` the result may also be `[parts, M, N]` in float32.
    """
    if not x.values_MK.is_cuda:
        return fp8_linear_reference(x, weight, out_dtype)
    if out_dtype is not None:
        return fp8_linear_triton(x, weight, out_dtype=out_dtype)
    width, depth = weight.values.shape
    if x.num_rows >= CUBLAS_ROWS and not deterministic and width % GROUP == 0 and depth % (4 * GROUP) == 0:
        return fp8_linear_cublas(x, weight)
    parts = choose_parts(width, depth)
    out = fp8_linear_triton(x, weight, parts=parts)
    if parts == 1 or keep_parts:
        return out
    total = out[0]
    for part in out[1:]:
        total = total + part
    return total.to(x.dtype)
