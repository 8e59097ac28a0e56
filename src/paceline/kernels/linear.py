"""`linear`: x [M, K] times weight [N, K] transposed, accumulated in float32.

A row's bits must not depend on how many rows ran with it.

- CPU: rows run in tiles of sizes whose bits were found to be the same (row_tiles.py).
- GPU: no split-K. Whatever the tile, a product is accumulated over K in order, 16 at a time, by the tensor
  core, and the two instructions the tiles below use (mma and wgmma) round alike: every tile gives the same
  bits, for every M (tests/kernels/test_linear.py checks it on the GPU). Below TMA_ROWS rows the time is that
  of reading the weights, which plain asynchronous copies do best; from there on whole tiles are loaded by
  TMA, where there is one (Hopper and newer).

Up to 64 rows the invariant kernel is also the fastest. From CUBLAS_ROWS on, cuBLAS, which may split K and so
rounds differently at different M, is 2-8% faster, and `deterministic=False` takes it.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from paceline.kernels.operation import cdiv
from paceline.kernels.row_tiles import multiply_rows
from paceline.kernels.triton_support import (
    TensorDescriptor,
    has_tma,
    launch_next,
    launch_options,
    multiprocessors,
    pull_to_l2,
    tl,
    triton,
    wait_previous,
)

# Rows from which on tiles are loaded by TMA, which is slow to fill in rows that do not exist.
TMA_ROWS = 64
# Row tiles that programs walk before the next column tile, so that both operands stay in L2.
ROW_TILES_TOGETHER = 16
# Rows from which on cuBLAS is faster.
CUBLAS_ROWS = 65
# Multiprocessors of the GPU that the tiles were chosen on.
PROCESSORS = 132
# Bytes of each weight row fetched into L2 before the previous kernel has finished (0 to 8192 were measured).
PULL_BYTES = 512


def linear_reference(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    if out_dtype is not None:
        # 16-bit products would be rounded to 16 bits before they are widened.
        x_MK, weight_NK = x_MK.to(out_dtype), weight_NK.to(out_dtype)
    return multiply_rows(x_MK, weight_NK)


@dataclass(frozen=True)
class Tile:
    """Rows of x by rows of weight by depth, and how a program runs; none of it changes a result's bits."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int

    def options(self, itemsize: int) -> dict:
        """Returns the options of a launch with this tile, for numbers of `itemsize` bytes."""
        return launch_options(
            self.warps, self.stages, stage_bytes=(self.rows + self.cols) * self.depth * itemsize
        )


def choose_tile(num_rows: int, width: int) -> Tile:
    """Returns the tile that was fastest on an H200 with the shapes of Qwen3-4B, -8B, -14B and Qwen2.5-7B.

    Those of 8B are N = 4096 (o, down), 6144 (qkv), 24576 (gate-up), 151936 (head). Narrow weights need narrow
    tiles to occupy every multiprocessor; wide ones amortise larger tiles. Where narrow tiles of up to 64 rows
    outnumber an H200's multiprocessors (N = 4608, 5120), the second round is nearly empty: wider ones are up
    to 30% faster.
    """
    narrow = width < 6144
    wide = width >= 16384
    one_round = width <= 32 * PROCESSORS
    if num_rows <= 16:
        return Tile(16, 32, 512, 4, 4) if one_round else Tile(16, 64, 256, 4, 4)
    if num_rows <= 64:
        if one_round:
            return Tile(64, 32, 128, 4, 6)
        if wide and num_rows <= 32:
            return Tile(32, 32, 256, 4, 3)
        shallow = wide and num_rows < TMA_ROWS
        return Tile(64, 64, 64, 4, 6) if shallow else Tile(64, 64, 128, 4, 5)
    if num_rows <= 128:
        if narrow:
            return Tile(128, 32, 128, 4, 5)
        return Tile(128, 128, 64, 8, 6) if wide else Tile(128, 64, 64, 4, 6)
    if num_rows <= 256 and narrow:
        return Tile(128, 64, 128, 4, 4)
    if num_rows <= 256 or (num_rows <= 1024 and not wide):
        return Tile(128, 128, 64, 4, 5)
    return Tile(128, 256, 64, 8, 3)


@triton.jit
def _pull_weight(
    weight_ptr, first_col, width, K: tl.constexpr, COLS: tl.constexpr, PULL: tl.constexpr, PDL: tl.constexpr
):
    """Begins to fetch the first PULL bytes of COLS weight rows; up to four threads share a row's bytes."""
    PARTS: tl.constexpr = 4 if COLS <= 32 else 2 if COLS <= 64 else 1
    ROW_BYTES: tl.constexpr = K * weight_ptr.dtype.element_ty.primitive_bitwidth // 8
    thread = tl.arange(0, COLS * PARTS)
    col = first_col + thread // PARTS
    address = weight_ptr.to(tl.int64) + col.to(tl.int64) * ROW_BYTES + thread % PARTS * (PULL // PARTS)
    pull_to_l2(address, tl.where(col < width, PULL // PARTS, 0), PDL)


@triton.jit(do_not_specialize=["M", "num_processors"])
def _stream_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    M,
    N,
    num_processors,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    PULL: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per COLS weight rows and tile of x rows; neighbours share weights through L2."""
    launch_next(PDL)
    row_tiles = tl.cdiv(M, ROWS)
    # Only the programs that start at once: the others start when there is nothing left to wait for.
    pulled_cols = tl.where(tl.program_id(0) < num_processors, N, 0)
    _pull_weight(weight_ptr, tl.program_id(0) // row_tiles * COLS, pulled_cols, K, COLS, PULL, PDL)
    row = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) // row_tiles * COLS + tl.arange(0, COLS)
    k = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
    weight_ptrs = weight_ptr + col.to(tl.int64)[None, :] * K + k[:, None]
    row_mask, col_mask = (row < M)[:, None], (col < N)[None, :]
    wait_previous(PDL)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for _ in range(K // DEPTH):
        x = tl.load(x_ptrs, mask=row_mask, other=0.0)
        weight = tl.load(weight_ptrs, mask=col_mask, other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
        x_ptrs += DEPTH
        weight_ptrs += DEPTH
    out_offset = row.to(tl.int64)[:, None] * N + col[None, :]
    tl.store(out_ptr + out_offset, acc.to(out_ptr.dtype.element_ty), mask=row_mask & col_mask)


@triton.jit(do_not_specialize=["M"])
def _tma_kernel(
    x_desc,
    weight_desc,
    out_ptr,
    M,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs walk GROUP row tiles before the next column tile, so that both operands stay in L2."""
    launch_next(PDL)
    row_tiles, col_tiles = tl.cdiv(M, ROWS), tl.cdiv(N, COLS)
    group = tl.program_id(0) // (GROUP * col_tiles)
    rows_in_group = tl.minimum(row_tiles - group * GROUP, GROUP)
    row_tile = group * GROUP + tl.program_id(0) % rows_in_group
    col_tile = (tl.program_id(0) % (GROUP * col_tiles)) // rows_in_group
    wait_previous(PDL)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for k in range(0, K, DEPTH):
        weight = weight_desc.load([col_tile * COLS, k])
        x = x_desc.load([row_tile * ROWS, k])
        acc = tl.dot(x, weight.T, acc, input_precision="ieee")
    row = row_tile * ROWS + tl.arange(0, ROWS)
    col = col_tile * COLS + tl.arange(0, COLS)
    out_offset = row.to(tl.int64)[:, None] * N + col[None, :]
    tl.store(
        out_ptr + out_offset, acc.to(out_ptr.dtype.element_ty), mask=(row < M)[:, None] & (col < N)[None, :]
    )


def linear_triton(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Launches the row-invariant kernel of `linear`."""
    num_rows, depth = x_MK.shape
    width = weight_NK.shape[0]
    tile = tile or choose_tile(num_rows, width)
    # SmolLM's depth is 576, for instance; a shallower tile gives the same bits.
    while depth % tile.depth:
        tile = replace(tile, depth=tile.depth // 2)
    out_MN = torch.empty(num_rows, width, dtype=out_dtype or x_MK.dtype, device=x_MK.device)
    grid = (cdiv(num_rows, tile.rows) * cdiv(width, tile.cols),)
    options = dict(K=depth, ROWS=tile.rows, COLS=tile.cols, DEPTH=tile.depth, **tile.options(x_MK.itemsize))
    if num_rows < TMA_ROWS or not has_tma(x_MK.device):
        pull = min(PULL_BYTES, depth * weight_NK.element_size()) // 64 * 64
        _stream_kernel[grid](
            x_MK, weight_NK, out_MN, num_rows, width, multiprocessors(x_MK.device), PULL=pull, **options
        )
    else:
        x_desc = TensorDescriptor(x_MK, [num_rows, depth], [depth, 1], [tile.rows, tile.depth])
        weight_desc = TensorDescriptor(weight_NK, [width, depth], [depth, 1], [tile.cols, tile.depth])
        _tma_kernel[grid](x_desc, weight_desc, out_MN, num_rows, width, GROUP=ROW_TILES_TOGETHER, **options)
    return out_MN


def linear(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """Returns x times weight transposed, `[M, N]`, in `out_dtype` (default x's; the LM head wants float32).

    On the GPU x and weight are contiguous 16-bit matrices and K is a multiple of 16.
    """
    if not x_MK.is_cuda:
        return linear_reference(x_MK, weight_NK, out_dtype)
    if deterministic or x_MK.shape[0] < CUBLAS_ROWS:
        return linear_triton(x_MK, weight_NK, out_dtype)
    if out_dtype not in (None, x_MK.dtype):
        return torch.mm(x_MK, weight_NK.t(), out_dtype=out_dtype)
    return F.linear(x_MK, weight_NK)
