"""The end of paged attention: heads are stored, and partial results of programs that share a row combined.

Where several programs share a row (split KV, as in Flash-Decoding), each writes one partial result per group
of keys: an unnormalised sum, a maximum and a total weight. The combining kernel folds a query's groups in
order, exactly as one program folds them in registers (`attention_tiles.fold`), so that both give the same
bits. The reference of both is `paged_attention.reference`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline.kernels.attention_tiles import AttentionShape, fold, fresh, normalised
from paceline.kernels.fp8_format import QuantisedRows, quantise_groups
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
    def pointers(self) -> tuple[torch.Tensor | None, ...]:
        """What kernels get: the plain result, and the values and scales of a quantised one."""
        return self.plain, *(
            (None, None) if self.rows is None else (self.rows.values_MK, self.rows.scales_GM)
        )

    @property
    def padded_rows(self) -> int:
        """The number of rows that the quantised tensors are allocated for."""
        return 0 if self.rows is None else len(self.rows.values_MK)


class Partials(NamedTuple):
    """One result per row, query, head and group of keys, in float32."""

    acc: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor

    @property
    def max_groups(self) -> int:
        return self.acc.shape[3]

    @classmethod
    def empty(cls, q_RQHD: torch.Tensor, max_groups: int) -> "Partials":
        """Allocates memory for `max_groups` results of each query."""
        shape = (*q_RQHD.shape[:3], max_groups)
        acc = torch.empty(*shape, q_RQHD.shape[3], dtype=torch.float32, device=q_RQHD.device)
        return cls(acc, *torch.empty(2, *shape, dtype=torch.float32, device=q_RQHD.device))


@triton.jit
def store_heads(heads, q_row, valid, out, padded_rows, SHAPE: tl.constexpr):
    """Stores rows of `heads`, which are heads of tokens with the numbers `q_row`.

    Quantised, a head is a group, and is rounded to 16 bits first.
    """
    out_ptr, values_ptr, scales_ptr = out
    offset = q_row[:, None] * SHAPE.head_dim + tl.arange(0, SHAPE.head_dim)[None, :]
    if values_ptr is not None:
        values, scales = quantise_groups(heads.to(out_ptr.dtype.element_ty).to(tl.float32))
        tl.store(values_ptr + offset, values, mask=valid[:, None])
        tl.store(scales_ptr + q_row % SHAPE.heads * padded_rows + q_row // SHAPE.heads, scales, mask=valid)
    else:
        tl.store(out_ptr + offset, heads.to(out_ptr.dtype.element_ty), mask=valid[:, None])


@triton.jit
def store_partial(partials, state, partial, valid, SHAPE: tl.constexpr):
    """Stores one group's result for each row of the state, under the numbers `partial`."""
    offset = partial[:, None] * SHAPE.head_dim + tl.arange(0, SHAPE.head_dim)[None, :]
    tl.store(partials.acc + offset, state[0], mask=valid[:, None])
    tl.store(partials.maximum + partial, state[1], mask=valid)
    tl.store(partials.total + partial, state[2], mask=valid)


@triton.jit
def load_partial(partials, partial, valid, SHAPE: tl.constexpr):
    offset = partial[:, None] * SHAPE.head_dim + tl.arange(0, SHAPE.head_dim)[None, :]
    return (
        tl.load(partials.acc + offset, mask=valid[:, None], other=0.0),
        tl.load(partials.maximum + partial, mask=valid, other=-float("inf")),
        tl.load(partials.total + partial, mask=valid, other=0.0),
    )


@triton.jit
def _load_partials(partials, first, valid, SHAPE: tl.constexpr, BATCH: tl.constexpr):
    """Loads BATCH groups' results from `first` on before any is used; what does not exist is undefined."""
    accs, maxima, totals = (), (), ()
    for i in tl.static_range(BATCH):
        offset = (first + i)[:, None] * SHAPE.head_dim + tl.arange(0, SHAPE.head_dim)[None, :]
        accs = accs + (tl.load(partials.acc + offset, mask=valid[:, None], other=0.0),)
        maxima = maxima + (tl.load(partials.maximum + first + i, mask=valid, other=0.0),)
        totals = totals + (tl.load(partials.total + first + i, mask=valid, other=0.0),)
    return accs, maxima, totals


@triton.jit
def _fold_partials(state, loaded, first, end, BATCH: tl.constexpr):
    """Folds the groups that exist into what the ones before them gave, in order."""
    accs, maxima, totals = loaded
    for i in tl.static_range(BATCH):
        exists = first + i < end
        acc = tl.where(exists[:, None], accs[i], 0.0)
        maximum = tl.where(exists, maxima[i], -float("inf"))
        state = fold(state, (acc, maximum, tl.where(exists, totals[i], 0.0)))
    return state


@triton.jit(do_not_specialize=["num_queries", "max_groups", "padded_rows"])
def _combine_kernel(
    partials,
    context_ptr,
    depth_ptr,
    v_scale_ptr,
    out,
    num_queries,
    max_groups,
    padded_rows,
    SHAPE: tl.constexpr,
    BATCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (query, kv head) folds the groups one by one; `max_groups` is a multiple of BATCH."""
    launch_next(PDL)
    GQA: tl.constexpr = SHAPE.heads // SHAPE.kv_heads
    query_row = tl.program_id(0)
    member = tl.arange(0, SHAPE.padded_gqa)
    valid = member < GQA
    q_row = query_row.to(tl.int64) * SHAPE.heads + tl.program_id(1) * GQA + member
    partial = q_row * max_groups
    context = tl.load(context_ptr + query_row // num_queries).to(tl.int32)
    if depth_ptr is not None:
        depth = tl.load(depth_ptr + query_row).to(tl.int32)
    else:
        depth = query_row % num_queries
    if SHAPE.fp8:
        v_scale = tl.load(v_scale_ptr + tl.program_id(1))
    wait_previous(PDL)
    loaded = _load_partials(partials, partial, valid, SHAPE, BATCH)
    num_groups = tl.where(context < 0, 0, (context + depth) // SHAPE.group + 1)
    end = partial + num_groups
    state = _fold_partials(fresh(SHAPE.padded_gqa, SHAPE.head_dim), loaded, partial, end, BATCH)
    for first in range(BATCH, num_groups, BATCH):
        loaded = _load_partials(partials, partial + first, valid, SHAPE, BATCH)
        state = _fold_partials(state, loaded, partial + first, end, BATCH)
    heads = normalised(state)
    if SHAPE.fp8:
        heads *= v_scale
    store_heads(heads, q_row, valid, out, padded_rows, SHAPE)


def combine_partials(
    partials: Partials,
    context_len_R: torch.Tensor,
    depth_RQ: torch.Tensor | None,
    v_scale_H: torch.Tensor | None,
    out: AttentionOutput,
    shape: AttentionShape,
) -> None:
    """Folds the partial results of every query into `out`; `depth_RQ` is that of tree nodes."""
    num_rows, num_queries = partials.acc.shape[:2]
    _combine_kernel[(num_rows * num_queries, shape.kv_heads)](
        partials,
        context_len_R,
        depth_RQ,
        v_scale_H,
        out.pointers,
        num_queries,
        partials.max_groups,
        out.padded_rows,
        SHAPE=shape,
        BATCH=COMBINE_BATCH,
        **launch_options(num_warps=4),
    )
