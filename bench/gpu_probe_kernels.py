"""Experimental GEMM variants for the second probe: TMA loads, ways to prefetch before the dependent-launch wait."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.kernels.triton_support import cdiv, launch_next, launch_options, wait_previous


@triton.jit
def _prefetch(weight_ptr, first_row, K: tl.constexpr, COLS: tl.constexpr, BYTES: tl.constexpr, MODE: tl.constexpr):
    """MODE 1: 128-byte lines by the load unit. MODE 2: bulk, 128 pieces."""
    if MODE == 1:
        piece = tl.arange(0, BYTES // 128)
        address = weight_ptr + (first_row + piece % COLS).to(tl.int64) * K + (piece // COLS) * 64
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
    if MODE == 2:
        SIZE: tl.constexpr = BYTES // 128
        piece = tl.arange(0, 128)
        address = weight_ptr + (first_row + piece % COLS).to(tl.int64) * K + (piece // COLS) * (SIZE // 2)
        size = tl.full((128,), SIZE, tl.int32)
        tl.inline_asm_elementwise("cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [address.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["M"])
def pointer_kernel(
    x_ptr, weight_ptr, out_ptr, M, N, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    MODE: tl.constexpr, BYTES: tl.constexpr, PEEL: tl.constexpr, PDL: tl.constexpr,
):
    launch_next(PDL)
    row_tiles = tl.cdiv(M, ROWS)
    row_tile, col_tile = tl.program_id(0) % row_tiles, tl.program_id(0) // row_tiles
    col = col_tile * COLS + tl.arange(0, COLS)
    k = tl.arange(0, DEPTH)
    weight_ptrs = weight_ptr + col.to(tl.int64)[None, :] * K + k[:, None]
    if MODE > 0:
        _prefetch(weight_ptr, col_tile * COLS, K, COLS, BYTES, MODE)
    if PEEL:
        first = tl.load(weight_ptrs)
    wait_previous(PDL)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
    row_mask = (row < M)[:, None]
    acc = tl.zeros((ROWS, COLS), tl.float32)
    if PEEL:
        acc = tl.dot(tl.load(x_ptrs, mask=row_mask, other=0.0), first, acc)
        x_ptrs += DEPTH
        weight_ptrs += DEPTH
    for _ in range(1 if PEEL else 0, K // DEPTH):
        x = tl.load(x_ptrs, mask=row_mask, other=0.0)
        acc = tl.dot(x, tl.load(weight_ptrs), acc)
        x_ptrs += DEPTH
        weight_ptrs += DEPTH
    tl.store(out_ptr + row.to(tl.int64)[:, None] * N + col[None, :], acc.to(out_ptr.dtype.element_ty), mask=row_mask)


@triton.jit(do_not_specialize=["M"])
def tma_kernel(
    x_desc, weight_desc, weight_ptr, out_ptr, M, N, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, MODE: tl.constexpr, BYTES: tl.constexpr, PDL: tl.constexpr,
):
    launch_next(PDL)
    row_tiles, col_tiles = tl.cdiv(M, ROWS), tl.cdiv(N, COLS)
    program = tl.program_id(0)
    group = program // (GROUP * col_tiles)
    rows_in_group = tl.minimum(row_tiles - group * GROUP, GROUP)
    row_tile = group * GROUP + program % rows_in_group
    col_tile = (program % (GROUP * col_tiles)) // rows_in_group
    if MODE > 0:
        _prefetch(weight_ptr, col_tile * COLS, K, COLS, BYTES, MODE)
    wait_previous(PDL)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for k in range(0, K, DEPTH):
        w = weight_desc.load([col_tile * COLS, k])
        x = x_desc.load([row_tile * ROWS, k])
        acc = tl.dot(x, w.T, acc)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    col = col_tile * COLS + tl.arange(0, COLS)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * N + col[None, :], acc.to(out_ptr.dtype.element_ty), mask=(row < M)[:, None] & (col < N)[None, :])


def pointer(x, w, rows, cols, depth, warps, stages, mode=0, kilobytes=64, peel=False, out_dtype=None):
    (m, k), n = x.shape, w.shape[0]
    out = torch.empty(m, n, dtype=out_dtype or x.dtype, device=x.device)
    pointer_kernel[(cdiv(m, rows) * (n // cols),)](x, w, out, m, n, K=k, ROWS=rows, COLS=cols, DEPTH=depth, MODE=mode, BYTES=kilobytes * 1024, PEEL=peel, **launch_options(warps, stages))
    return out


def tma(x, w, rows, cols, depth, warps, stages, mode=0, kilobytes=64, out_dtype=None):
    (m, k), n = x.shape, w.shape[0]
    out = torch.empty(m, n, dtype=out_dtype or x.dtype, device=x.device)
    x_desc = TensorDescriptor(x, [m, k], [k, 1], [rows, depth])
    w_desc = TensorDescriptor(w, [n, k], [k, 1], [cols, depth])
    tma_kernel[(cdiv(m, rows) * cdiv(n, cols),)](x_desc, w_desc, w, out, m, n, K=k, ROWS=rows, COLS=cols, DEPTH=depth, GROUP=16, MODE=mode, BYTES=kilobytes * 1024, **launch_options(warps, stages))
    return out


@triton.jit(do_not_specialize=["M"])
def persistent_kernel(
    x_ptr, weight_ptr, out_ptr, M, N, PROGRAMS, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):
    """A fixed number of programs, each over several column tiles, loads pipelined across tiles."""
    launch_next(PDL)
    wait_previous(PDL)
    k = tl.arange(0, DEPTH)
    row = tl.arange(0, ROWS)
    row_mask = (row < M)[:, None]
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, COLS), PROGRAMS, flatten=True):
        col = tile * COLS + tl.arange(0, COLS)
        acc = tl.zeros((ROWS, COLS), tl.float32)
        for i in range(K // DEPTH):
            x = tl.load(x_ptr + row[:, None] * K + i * DEPTH + k[None, :], mask=row_mask, other=0.0)
            w = tl.load(weight_ptr + col.to(tl.int64)[None, :] * K + i * DEPTH + k[:, None])
            acc = tl.dot(x, w, acc)
        tl.store(out_ptr + row.to(tl.int64)[:, None] * N + col[None, :], acc.to(out_ptr.dtype.element_ty), mask=row_mask)


def persistent(x, w, rows, cols, depth, warps, stages, per_sm=1, out_dtype=None):
    (m, k), n = x.shape, w.shape[0]
    assert m <= rows
    out = torch.empty(m, n, dtype=out_dtype or x.dtype, device=x.device)
    programs = min(132 * per_sm, n // cols)
    persistent_kernel[(programs,)](x, w, out, m, n, programs, K=k, ROWS=rows, COLS=cols, DEPTH=depth, **launch_options(warps, stages))
    return out
