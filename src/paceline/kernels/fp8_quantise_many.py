"""Weights in blocks of 128 x 128, as `quantise_blocks` does it, many at a time: one launch for each shape.

A policy has hundreds of projections and a handful of shapes; to launch a kernel for each of them would take
the host longer than the GPU needs to quantise. Where they lie is told the GPU once, in tables.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.kernels.fp8_format import GROUP, BlockMatrix
from paceline.kernels.fp8_quantise import quantise_block, quantise_blocks_reference
from paceline.kernels.triton_support import cdiv, launch_options, tl, triton, wait_previous

# Bytes that a GPU reads at once, if they begin at a multiple of as many.
VECTOR = 16


@triton.jit
def _quantise_many_kernel(
    rows_ptr,
    values_ptr,
    scales_ptr,
    N,
    K,
    PADDED_K,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per block, in `_quantise_blocks_kernel`'s order; pointers are to tables of addresses."""
    wait_previous(PDL)
    matrix = tl.program_id(2)
    first = tl.program_id(1) * 128
    block = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    rows = tl.load(rows_ptr + matrix * tl.num_programs(1) + tl.program_id(1)).to(tl.pointer_type(DTYPE))
    values = tl.load(values_ptr + matrix).to(tl.pointer_type(tl.float8e4nv))
    scales = tl.load(scales_ptr + matrix).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        rows = tl.multiple_of(rows, 16)
    values = tl.multiple_of(values, 16) + first.to(tl.int64) * PADDED_K
    quantise_block(rows, values, scales + block, N - first, tl.program_id(0) * 128, K, PADDED_K)


@dataclass(frozen=True)
class MatrixTable:
    """Where matrices `[N, K]` of one shape and type lie on a GPU, and where their E4M3 numbers go."""

    rows_MR: torch.Tensor  # the address of the first of every 128 rows
    values_M: torch.Tensor
    scales_M: torch.Tensor
    shape: tuple[int, int]
    padded_depth: int
    dtype: torch.dtype
    aligned: bool  # whether all `rows_MR` are multiples of `VECTOR`

    @staticmethod
    def of(pairs: Sequence[tuple[torch.Tensor, BlockMatrix]]) -> "MatrixTable":
        """Returns the table of weights whose last two axes and types are alike."""
        weight, out = pairs[0]
        width, depth = weight.shape[-2:]
        row_blocks = np.arange(cdiv(width, GROUP)) * (GROUP * depth * weight.itemsize)
        rows_MR = np.concatenate([_addresses(weight) for weight, _ in pairs])[:, None] + row_blocks
        values_M = np.concatenate([_addresses(out.values) for _, out in pairs])
        assert not (values_M % VECTOR).any()
        scales_M = np.concatenate([_addresses(out.scales) for _, out in pairs])
        return MatrixTable(
            *(torch.from_numpy(table).to(weight.device) for table in (rows_MR, values_M, scales_M)),
            shape=(width, depth),
            padded_depth=out.values.shape[-1],
            dtype=weight.dtype,
            aligned=not (rows_MR % VECTOR).any(),
        )


def _addresses(tensor: torch.Tensor) -> np.ndarray:
    """Returns where each matrix of a contiguous tensor `[N, K]` or `[X, N, K]` begins."""
    assert tensor.is_contiguous()
    count = len(tensor) if tensor.dim() == 3 else 1
    return tensor.data_ptr() + np.arange(count) * (tensor.nbytes // max(1, count))


def quantise_many_triton(table: MatrixTable) -> None:
    """Launches `BlockQuantiser`'s kernel."""
    width, depth = table.shape
    matrices, row_blocks = table.rows_MR.shape
    _quantise_many_kernel[(cdiv(depth, GROUP), row_blocks, matrices)](
        table.rows_MR,
        table.values_M,
        table.scales_M,
        width,
        depth,
        table.padded_depth,
        DTYPE=getattr(tl, str(table.dtype).removeprefix("torch.")),
        ALIGNED=table.aligned,
        **launch_options(num_warps=8),
    )


class BlockQuantiser:
    """Quantises weights that mostly stay where they are into `outs`, whose addresses do not change."""

    def __init__(self, outs: Sequence[BlockMatrix]) -> None:
        self._outs = outs
        self._facts: list[Any] = []
        self._tables: list[MatrixTable] = []

    def quantise(self, weights: Sequence[torch.Tensor]) -> None:
        """Writes contiguous weights `[N, K]` or `[X, N, K]` of one device, one into each of `outs`."""
        if weights[0].is_cuda:
            self.quantise_triton(weights)
        else:
            for weight, out in zip(weights, self._outs, strict=True):
                quantise_blocks_reference(weight, out)

    def quantise_triton(self, weights: Sequence[torch.Tensor]) -> None:
        """Does so with the kernel; tables are made anew when a weight has another place, shape or type."""
        facts = [(weight.data_ptr(), weight.dtype, weight.shape, weight.stride()) for weight in weights]
        if facts != self._facts:
            pairs = zip(weights, self._outs, strict=True)
            self._tables = [MatrixTable.of(alike) for alike in _by_shape(pairs)]
            self._facts = facts
        for table in self._tables:
            quantise_many_triton(table)


def _by_shape(
    pairs: Iterable[tuple[torch.Tensor, BlockMatrix]],
) -> Iterator[list[tuple[torch.Tensor, BlockMatrix]]]:
    """Yields those together whose matrices have the same shape and type."""
    alike: dict[Any, list[tuple[torch.Tensor, BlockMatrix]]] = {}
    for weight, out in pairs:
        alike.setdefault((weight.shape[-2:], weight.dtype), []).append((weight, out))
    yield from alike.values()
