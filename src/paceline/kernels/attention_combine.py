"""The end of paged attention: heads are stored, and partial results of programs that share a row combined.

Where several programs share a row (split KV, as in Flash-Decoding), each writes one partial result per group
of keys: an unnormalised sum, a maximum and a total weight. The combining kernel folds a query's groups in
order, exactly as one program folds them in registers (`attention_tiles.fold`), so that both give the same
bits. The reference of both is `paged_attention_reference`.
"""

from dataclasses import dataclass

import torch

from paceline.kernels.attention_tiles import GROUP, fold, fresh, normalised
from paceline.kernels.fp8_format import QuantisedRows, quantise_groups
from paceline.kernels.operation import next_power_of_2
from paceline.kernels.paged_launch import COMBINE_BATCH
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous


@dataclass(frozen=True)
class AttentionOutput:
    """Where attention writes: plain heads `[R, Q, Hq, D]`, or rows quantised for an FP8 product."""

    # The plain result. For a quantised one only its type is read, and the queries stand in for it.
    plain: torch.Tensor
    rows: QuantisedRows | None

    @classmethod
    def empty(cls, q_RQHD: torch.Tensor, quantise: bool) -> "AttentionOutput":
        if not quantise:
            return cls(torch.empty_like(q_RQHD), None)
        num_rows, num_queries, num_heads, head_dim = q_RQHD.shape
        rows = QuantisedRows.empty(num_rows * num_queries, num_heads * head_dim, q_RQHD.dtype, q_RQHD.device)
        return cls(q_RQHD, rows)

    @property
    def result(self) -> torch.Tensor | QuantisedRows:
        """What the caller gets."""
        return self.plain if self.rows is None else self.rows

    @property
    def values(self) -> torch.Tensor | None:
        return None if self.rows is None else self.rows.values_MK

    @property
    def scales(self) -> torch.Tensor | None:
        return None if self.rows is None else self.rows.scales_GM

    @property
    def padded_rows(self) -> int:
        """The number of rows that the quantised tensors are allocated for."""
        return 0 if self.rows is None else len(self.rows.values_MK)


@dataclass(frozen=True)
class Partials:
    """One result per row, query, head and group of keys, in float32."""

    acc: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor
    max_groups: int

    @classmethod
    def empty(cls, q_RQHD: torch.Tensor, max_groups: int) -> "Partials":
        """Allocates memory for `max_groups` results of each query."""
        shape = (*q_RQHD.shape[:3], max_groups)
        acc = torch.empty(*shape, q_RQHD.shape[3], dtype=torch.float32, device=q_RQHD.device)
        maximum, total = torch.empty(2, *shape, dtype=torch.float32, device=q_RQHD.device)
        return cls(acc, maximum, total, max_groups)


@triton.jit
def store_heads(
    out,
    q_row,
    valid,
    out_ptr,
    values_ptr,
    scales_ptr,
    padded_rows,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUANTISE: tl.constexpr,
):
    """Stores rows of `out`, which are heads of tokens with the numbers `q_row`.

    Quantised, a head is a group, and is rounded to 16 bits first.
    """
    offset = q_row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    if QUANTISE:
        values, scales = quantise_groups(out.to(out_ptr.dtype.element_ty).to(tl.float32))
        tl.store(values_ptr + offset, values, mask=valid[:, None])
        tl.store(scales_ptr + q_row % NUM_HEADS * padded_rows + q_row // NUM_HEADS, scales, mask=valid)
    else:
        tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=valid[:, None])


@triton.jit
def store_partial(
    acc_ptr, maximum_ptr, total_ptr, acc, maximum, total, partial, valid, HEAD_DIM: tl.constexpr
):
    """Stores one group's result for each row of `acc`, under the numbers `partial`."""
    offset = partial[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(acc_ptr + offset, acc, mask=valid[:, None])
    tl.store(maximum_ptr + partial, maximum, mask=valid)
    tl.store(total_ptr + partial, total, mask=valid)


@triton.jit
def load_partial(acc_ptr, maximum_ptr, total_ptr, partial, valid, HEAD_DIM: tl.constexpr):
    offset = partial[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    return (
        tl.load(acc_ptr + offset, mask=valid[:, None], other=0.0),
        tl.load(maximum_ptr + partial, mask=valid, other=-float("inf")),
        tl.load(total_ptr + partial, mask=valid, other=0.0),
    )


@triton.jit
def _load_partials(
    acc_ptr, maximum_ptr, total_ptr, first, valid, HEAD_DIM: tl.constexpr, BATCH: tl.constexpr
):
    """Loads BATCH groups' results from `first` on before any is used; what does not exist is undefined."""
    accs, maxima, totals = (), (), ()
    for i in tl.static_range(BATCH):
        offset = (first + i)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        accs = accs + (tl.load(acc_ptr + offset, mask=valid[:, None], other=0.0),)
        maxima = maxima + (tl.load(maximum_ptr + first + i, mask=valid, other=0.0),)
        totals = totals + (tl.load(total_ptr + first + i, mask=valid, other=0.0),)
    return accs, maxima, totals


@triton.jit
def _fold_partials(acc, maximum, total, accs, maxima, totals, first, end, BATCH: tl.constexpr):
    """Folds the groups that exist into what the ones before them gave, in order."""
    for i in tl.static_range(BATCH):
        exists = first + i < end
        group_acc = tl.where(exists[:, None], accs[i], 0.0)
        group_maximum = tl.where(exists, maxima[i], -float("inf"))
        acc, maximum, total = fold(
            acc, maximum, total, group_acc, group_maximum, tl.where(exists, totals[i], 0.0)
        )
    return acc, maximum, total


@triton.jit(do_not_specialize=["num_queries", "max_groups", "padded_rows"])
def _combine_kernel(
    acc_ptr,
    maximum_ptr,
    total_ptr,
    context_ptr,
    depth_ptr,
    v_scale_ptr,
    out_ptr,
    values_ptr,
    scales_ptr,
    num_queries,
    max_groups,
    padded_rows,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_GQA: tl.constexpr,
    GROUP: tl.constexpr,
    BATCH: tl.constexpr,
    TREE: tl.constexpr,
    FP8: tl.constexpr,
    QUANTISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (query, kv head) folds the groups one by one; `max_groups` is a multiple of BATCH."""
    launch_next(PDL)
    GQA: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    query_row = tl.program_id(0)
    member = tl.arange(0, PADDED_GQA)
    valid = member < GQA
    q_row = query_row.to(tl.int64) * NUM_HEADS + tl.program_id(1) * GQA + member
    partial = q_row * max_groups
    context = tl.load(context_ptr + query_row // num_queries).to(tl.int32)
    if TREE:
        depth = tl.load(depth_ptr + query_row).to(tl.int32)
    else:
        depth = query_row % num_queries
    if FP8:
        v_scale = tl.load(v_scale_ptr + tl.program_id(1))
    wait_previous(PDL)
    accs, maxima, totals = _load_partials(acc_ptr, maximum_ptr, total_ptr, partial, valid, HEAD_DIM, BATCH)
    num_groups = tl.where(context < 0, 0, (context + depth) // GROUP + 1)
    end = partial + num_groups
    acc, maximum, total = fresh(PADDED_GQA, HEAD_DIM)
    acc, maximum, total = _fold_partials(acc, maximum, total, accs, maxima, totals, partial, end, BATCH)
    for first in range(BATCH, num_groups, BATCH):
        accs, maxima, totals = _load_partials(
            acc_ptr, maximum_ptr, total_ptr, partial + first, valid, HEAD_DIM, BATCH
        )
        acc, maximum, total = _fold_partials(
            acc, maximum, total, accs, maxima, totals, partial + first, end, BATCH
        )
    out = normalised(acc, total)
    if FP8:
        out *= v_scale
    store_heads(
        out, q_row, valid, out_ptr, values_ptr, scales_ptr, padded_rows, NUM_HEADS, HEAD_DIM, QUANTISE
    )


def combine_partials(
    partials: Partials,
    context_len_R: torch.Tensor,
    depth_RQ: torch.Tensor | None,
    v_scale_H: torch.Tensor | None,
    out: AttentionOutput,
    num_kv_heads: int,
    fp8: bool,
) -> None:
    """Folds the partial results of every query into `out`; `depth_RQ` is that of tree nodes."""
    num_rows, num_queries, num_heads, _, head_dim = partials.acc.shape
    _combine_kernel[(num_rows * num_queries, num_kv_heads)](
        partials.acc,
        partials.maximum,
        partials.total,
        context_len_R,
        depth_RQ,
        v_scale_H,
        out.plain,
        out.values,
        out.scales,
        num_queries,
        partials.max_groups,
        out.padded_rows,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_GQA=next_power_of_2(num_heads // num_kv_heads),
        GROUP=GROUP,
        BATCH=COMBINE_BATCH,
        TREE=depth_RQ is not None,
        FP8=fp8,
        QUANTISE=out.rows is not None,
        **launch_options(num_warps=4),
    )
