"""`linear`: x [M, K] times weight [N, K] transposed, with the decode step's epilogues (residual add, SwiGLU, float32 out).

A row's bits must not depend on how many rows ran with it.

- CPU: rows run in tiles of exactly ROW_TILE rows, padded with zeros; BLAS then always sees the same shape.
- GPU: one Triton kernel, no split-K. Whatever the tile, a product is accumulated in float32 by the same tensor-core
  instruction over K in order, so every tile in TILES gives the same bits (tests/kernels/test_linear.py checks it on the
  GPU for M = 1..256). Decoding is bound by reading the weights, and this kernel reads them faster than cuBLAS does, so
  the invariant kernel is also the fast one up to MAX_TRITON_ROWS; beyond that, `deterministic=False` takes cuBLAS.

The kernel asks L2 for its first weights before it waits for its input (programmatic dependent launch, triton_support.py):
the small kernels between two GEMMs then run while the next weights are already on their way.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.kernels.swiglu import silu_multiply, silu_multiply_block, silu_multiply_reference
from paceline.kernels.triton_support import (
    INTERPRETED, cdiv, launch_next, launch_options, tl, triton, wait_previous,
)  # fmt: skip

ROW_TILE = 32  # CPU: the smallest tile that costs little at M = 128 and not much at M = 1


@dataclass(frozen=True)
class Tile:
    """Rows of x by rows of weight by depth, and how the program runs."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    prefetch: int = 0  # bytes of each program's weights asked for before waiting


def linear_reference(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    residual_MN: torch.Tensor | None = None,
    swiglu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    num_rows = x_MK.shape[0]
    padding = -num_rows % ROW_TILE
    padded = F.pad(x_MK, (0, 0, 0, padding)) if padding else x_MK
    tiles = [F.linear(tile, weight_NK) for tile in padded.split(ROW_TILE)]
    out_MN = (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:num_rows]
    if swiglu:
        out_MN = silu_multiply_reference(out_MN)
    if residual_MN is not None:
        out_MN = out_MN + residual_MN
    return out_MN.to(out_dtype or x_MK.dtype)


@triton.jit
def _prefetch_weights(weight_ptr, first_col, N, K: tl.constexpr, COLS: tl.constexpr, BYTES: tl.constexpr):
    """Ask L2 for the first BYTES of COLS weight rows, 16-bit elements, in pieces of 256 bytes."""
    piece = tl.arange(0, BYTES // 256)
    row = first_col + piece % COLS
    address = weight_ptr + row.to(tl.int64) * K + (piece // COLS) * 128
    address = tl.where(row < N, address, weight_ptr)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 256; mov.u32 $0, 0;", "=r,l", [address.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _linear_kernel(
    x_ptr, weight_ptr, residual_ptr, out_ptr, M, N, K: tl.constexpr,
    SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [M, N]; under SWIGLU the weight has 2N rows, gate then up, and a program computes the same columns of both."""
    launch_next(PDL)
    # Neighbouring programs share weights (few rows) or a GROUP of row tiles (many rows), so that L2 serves the rest.
    row_tiles, col_tiles = tl.cdiv(M, ROWS), tl.cdiv(N, COLS)
    program = tl.program_id(0)
    group = program // (GROUP * col_tiles)
    rows_in_group = tl.minimum(row_tiles - group * GROUP, GROUP)
    row_tile = group * GROUP + program % rows_in_group
    col_tile = (program % (GROUP * col_tiles)) // rows_in_group
    if PREFETCH:
        _prefetch_weights(weight_ptr, col_tile * COLS, N, K, COLS, PREFETCH)
        if SWIGLU:
            _prefetch_weights(weight_ptr + N.to(tl.int64) * K, col_tile * COLS, N, K, COLS, PREFETCH)
    wait_previous(PDL)

    row = row_tile * ROWS + tl.arange(0, ROWS)
    col = col_tile * COLS + tl.arange(0, COLS)
    k = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
    weight_ptrs = weight_ptr + col.to(tl.int64)[None, :] * K + k[:, None]
    row_mask, col_mask = (row < M)[:, None], (col < N)[None, :]
    acc = tl.zeros((ROWS, COLS), tl.float32)
    acc_up = tl.zeros((ROWS, COLS), tl.float32)
    for _ in range(K // DEPTH):
        x = tl.load(x_ptrs, mask=row_mask, other=0.0)
        acc = tl.dot(x, tl.load(weight_ptrs, mask=col_mask, other=0.0), acc, input_precision="ieee")
        if SWIGLU:
            up = tl.load(weight_ptrs + N.to(tl.int64) * K, mask=col_mask, other=0.0)
            acc_up = tl.dot(x, up, acc_up, input_precision="ieee")
        x_ptrs += DEPTH
        weight_ptrs += DEPTH

    out_type = out_ptr.dtype.element_ty
    if SWIGLU:
        acc = silu_multiply_block(acc.to(out_type).to(tl.float32), acc_up.to(out_type).to(tl.float32))
    offset = row.to(tl.int64)[:, None] * N + col[None, :]
    if RESIDUAL:
        acc += tl.load(residual_ptr + offset, mask=row_mask & col_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offset, acc.to(out_type), mask=row_mask & col_mask)


def _prefetch_bytes(tile: Tile, depth: int) -> int:
    """A power of two, no more than the program will read, and at least one piece of 256 bytes of each row."""
    return min(tile.prefetch, 1 << ((tile.cols * depth * 2).bit_length() - 1)) if depth >= 128 else 0


def linear_triton(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    residual_MN: torch.Tensor | None = None,
    swiglu: bool = False,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    num_rows, depth = x_MK.shape
    width = weight_NK.shape[0] // 2 if swiglu else weight_NK.shape[0]
    tile = tile or choose_tile(num_rows, width, swiglu)
    out_MN = torch.empty(num_rows, width, dtype=out_dtype or x_MK.dtype, device=x_MK.device)
    tile_depth = tile.depth
    while depth % tile_depth:  # a shallower tile gives the same bits
        tile_depth //= 2
    grid = (cdiv(num_rows, tile.rows) * cdiv(width, tile.cols),)
    prefetch = 0 if INTERPRETED or x_MK.element_size() != 2 else _prefetch_bytes(tile, depth)
    _linear_kernel[grid](
        x_MK, weight_NK, residual_MN, out_MN, num_rows, width, K=depth, SWIGLU=swiglu, RESIDUAL=residual_MN is not None,
        ROWS=tile.rows, COLS=tile.cols, DEPTH=tile_depth, GROUP=16, PREFETCH=prefetch,
        **launch_options(num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip
    return out_MN


def choose_tile(num_rows: int, width: int, swiglu: bool) -> Tile:
    return Tile(64, 32, 128, 4, 4)


def linear(x_MK, weight_NK, residual_MN=None, swiglu=False, out_dtype=None, deterministic=False):
    if not x_MK.is_cuda:
        return linear_reference(x_MK, weight_NK, residual_MN, swiglu, out_dtype)
    return linear_triton(x_MK, weight_NK, residual_MN, swiglu, out_dtype)
