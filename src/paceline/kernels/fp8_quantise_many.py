"""Weights in blocks of 128 x 128, as `quantise_blocks` does it, many at a time: one launch for each shape.

A policy has hundreds of projections and a handful of shapes; to launch a kernel for each of them would take
the host longer than the GPU needs to quantise. Their addresses are sent to the GPU once, in tables.

Weights that arrive from elsewhere are copied and quantised from the same read. They come in pieces, as files
have them, and a block's rows must all be in one:

    qkv [N, K]     | q_proj            | k_proj  | v_proj  |     one behind the other
    blocks         |    |    |    |    |    |    |    |    |     of 128 rows

Where they are not, the pieces are copied first, and the copy is quantised.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
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
    copies_ptr,
    values_ptr,
    scales_ptr,
    N,
    K,
    PADDED_K,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    COPY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per block, in `_quantise_blocks_kernel`'s order; pointers are to tables of addresses."""
    wait_previous(PDL)
    matrix = tl.program_id(2)
    first = tl.program_id(1) * 128
    row_block = matrix * tl.num_programs(1) + tl.program_id(1)
    rows = tl.load(rows_ptr + row_block).to(tl.pointer_type(DTYPE))
    copy = tl.load(copies_ptr + row_block).to(tl.pointer_type(DTYPE)) if COPY else rows
    if ALIGNED:
        rows = tl.multiple_of(rows, 16)
        copy = tl.multiple_of(copy, 16)
    values = tl.load(values_ptr + matrix).to(tl.pointer_type(tl.float8e4nv))
    values = tl.multiple_of(values, 16) + first.to(tl.int64) * PADDED_K
    scales = tl.load(scales_ptr + matrix).to(tl.pointer_type(tl.float32))
    scale = scales + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    quantise_block(rows, copy, values, scale, N - first, tl.program_id(0) * 128, K, PADDED_K, COPY)


@dataclass(frozen=True)
class WeightUpdate:
    """A contiguous weight `[N, K]` or `[X, N, K]`, where its E4M3 numbers go, and what its rows are to be."""

    weight: torch.Tensor
    out: BlockMatrix
    # One behind the other; none where the weight holds them already.
    pieces: Sequence[torch.Tensor] = ()

    @property
    def has_whole_blocks(self) -> bool:
        """Whether a kernel can take every block from one of the pieces."""
        weight = self.weight
        alike = all(
            piece.is_contiguous() and piece.dtype == weight.dtype and piece.device == weight.device
            for piece in self.pieces
        )
        # A matrix ends with a block, however many rows that has.
        ends = [stop % weight.shape[-2] for stop in accumulate(map(len, self.pieces))]
        return alike and not any(end % GROUP for end in ends)

    def copy(self) -> None:
        if self.pieces:
            rows = self.weight.view(-1, self.weight.shape[-1]).split([len(piece) for piece in self.pieces])
            torch._foreach_copy_(list(rows), list(self.pieces))


@dataclass(frozen=True)
class MatrixTable:
    """Where matrices `[N, K]` of one shape and type lie on a GPU, and where their E4M3 numbers go."""

    # Where each block of 128 rows begins, and where it is copied to.
    rows_MR: torch.Tensor
    copies_MR: torch.Tensor | None
    values_M: torch.Tensor
    scales_M: torch.Tensor
    shape: tuple[int, int]
    padded_depth: int
    dtype: torch.dtype
    aligned: bool  # whether all rows begin at a multiple of `VECTOR`

    @staticmethod
    def of(updates: Sequence[WeightUpdate]) -> "MatrixTable":
        """Returns the table of weights that are alike: in their last two axes, in type, in having pieces."""
        weight, out = updates[0].weight, updates[0].out
        width, depth = weight.shape[-2:]
        row_blocks = cdiv(width, GROUP)
        own_MR = np.concatenate([_row_blocks(update.weight) for update in updates]).reshape(-1, row_blocks)
        rows_MR = own_MR
        if updates[0].pieces:
            pieces = [piece for update in updates for piece in update.pieces]
            rows_MR = np.concatenate([_row_blocks(piece) for piece in pieces]).reshape(own_MR.shape)
        values_M = np.concatenate([_matrices(update.out.values) for update in updates])
        assert not (values_M % VECTOR).any()
        scales_M = np.concatenate([_matrices(update.out.scales) for update in updates])

        def on_device(table: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(table).to(weight.device)

        return MatrixTable(
            on_device(rows_MR),
            on_device(own_MR) if updates[0].pieces else None,
            on_device(values_M),
            on_device(scales_M),
            shape=(width, depth),
            padded_depth=out.values.shape[-1],
            dtype=weight.dtype,
            aligned=not (rows_MR % VECTOR).any() and not (own_MR % VECTOR).any(),
        )


def _matrices(tensor: torch.Tensor) -> np.ndarray:
    """Returns where each matrix of a contiguous tensor `[N, K]` or `[X, N, K]` begins."""
    assert tensor.is_contiguous()
    count = len(tensor) if tensor.dim() == 3 else 1
    return tensor.data_ptr() + np.arange(count) * (tensor.nbytes // max(1, count))


def _row_blocks(tensor: torch.Tensor) -> np.ndarray:
    """Returns where each block of 128 rows of each matrix begins."""
    width, depth = tensor.shape[-2:]
    offsets = np.arange(cdiv(width, GROUP)) * (GROUP * depth * tensor.itemsize)
    return (_matrices(tensor)[:, None] + offsets).ravel()


def quantise_many_triton(table: MatrixTable) -> None:
    width, depth = table.shape
    matrices, row_blocks = table.rows_MR.shape
    copies = table.copies_MR is not None
    _quantise_many_kernel[(cdiv(depth, GROUP), row_blocks, matrices)](
        table.rows_MR,
        table.copies_MR if copies else table.rows_MR,
        table.values_M,
        table.scales_M,
        width,
        depth,
        table.padded_depth,
        DTYPE=getattr(tl, str(table.dtype).removeprefix("torch.")),
        ALIGNED=table.aligned,
        COPY=copies,
        **launch_options(num_warps=8),
    )


class BlockQuantiser:
    """Quantises weights whose addresses, and those of their updates, rarely change."""

    def __init__(self) -> None:
        self._facts: list[Any] = []
        self._copied_first: list[int] = []  # numbers of updates, which would keep what arrived alive
        self._tables: list[MatrixTable] = []

    def quantise(self, updates: Sequence[WeightUpdate]) -> None:
        """Updates weights of one device, and their E4M3 numbers with them."""
        if updates[0].weight.is_cuda:
            self.quantise_triton(updates)
        else:
            for update in updates:
                update.copy()
                quantise_blocks_reference(update.weight, update.out)

    def quantise_triton(self, updates: Sequence[WeightUpdate]) -> None:
        """Does so with the kernel; tables are rebuilt when a tensor's address, shape or type has changed."""
        facts = [
            (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            for update in updates
            for tensor in (update.weight, update.out.values, *update.pieces)
        ]
        if facts != self._facts:
            self._copied_first = [i for i, update in enumerate(updates) if not update.has_whole_blocks]
            self._tables = [MatrixTable.of(alike) for alike in _alike(updates)]
            self._facts = facts
        for number in self._copied_first:
            updates[number].copy()
        for table in self._tables:
            quantise_many_triton(table)


def _alike(updates: Sequence[WeightUpdate]) -> list[list[WeightUpdate]]:
    """Returns together what one launch can take; of those that are copied first, the weight is read."""
    groups: dict[Any, list[WeightUpdate]] = {}
    for update in updates:
        if not update.has_whole_blocks:
            update = WeightUpdate(update.weight, update.out)
        weight = update.weight
        groups.setdefault((weight.shape[-2:], weight.dtype, bool(update.pieces)), []).append(update)
    return list(groups.values())
