"""Attention of a few new queries per row over the paged KV cache: decoding (Q = 1) and verification (Q = k +
1).

Query j of row r sits at absolute position context_len[r] + j and attends to keys 0 .. context_len[r] + j; a
row with context_len < 0 is inactive and gives zeros. The caches are [num_blocks, block_size, num_kv_heads,
head_dim].

A query's bits depend on its own sequence only, not on the batch, on Q, or on whether a prefill kernel
computed it (attention_tiles.py). With many rows one program walks its whole row and folds in registers. With
fewer, programs are spread over the rows in proportion to their lengths, those of one row share its groups,
and a second kernel folds their partial results. Both fold the same numbers in the same order. Queries and the
heads of a GQA group are packed into a tile's rows.
"""

from dataclasses import dataclass

import torch

from paceline.kernels.attention_reference import attend_reference
from paceline.kernels.attention_tiles import (
    GROUP,
    LOG2E,
    TILE,
    as_fp8_query,
    attend_keys,
    by_rows,
    fold,
    fresh,
    fresh_keys,
    normalised,
    tile_blocks,
)
from paceline.kernels.fp8_format import E4M3, QuantisedRows, quantise_groups
from paceline.kernels.fp8_format import GROUP as QUANTISED_GROUP
from paceline.kernels.fp8_quantise import quantise_rows
from paceline.kernels.triton_support import (
    TRITON_VERSION,
    cdiv,
    launch_next,
    launch_options,
    multiprocessors,
    next_power_of_2,
    tl,
    triton,
    wait_previous,
)

COMBINE_BATCH = 8  # partial results loaded at a time
RESIDENT, FP8_RESIDENT = (
    3,
    4,
)  # programs with work for each multiprocessor, where several share a row: as many as run at once
# programs per multiprocessor that are launched where several share a row; those that get no groups cost
# little
FILL = 8
MIN_ROWS, MAX_ROWS = (
    8,
    16,
    # (query, head of the group) pairs per program: a tensor core takes 8, and 16 share what is read of the cache
)


def paged_attention_reference(
    q_RQHD, k_cache, v_cache, block_table_RB, context_len_R, k_scale_H=None, v_scale_H=None
):
    num_rows, num_queries, num_heads, head_dim = q_RQHD.shape
    position_RQ = context_len_R.unsqueeze(1) + torch.arange(num_queries)
    position_RQ = torch.where(context_len_R.unsqueeze(1) < 0, -1, position_RQ)
    table = block_table_RB.repeat_interleave(num_queries, dim=0)
    out = attend_reference(
        q_RQHD.flatten(0, 1), position_RQ.flatten(), table, k_cache, v_cache, k_scale_H, v_scale_H
    )
    return out.view(q_RQHD.shape)


@triton.jit
def _groups_in_batch(context_ptr, num_rows, num_queries, GROUP: tl.constexpr):
    """Groups of all rows together."""
    BATCH: tl.constexpr = 256
    groups = 0
    for first in range(0, num_rows, BATCH):
        row = first + tl.arange(0, BATCH)
        context = tl.load(context_ptr + row, mask=row < num_rows, other=-1).to(tl.int32)
        groups += tl.sum(tl.where(context < 0, 0, (context + num_queries - 1) // GROUP + 1), axis=0)
    return groups


@triton.jit(
    do_not_specialize=["num_rows", "num_queries", "table_width", "max_groups", "resident", "padded_rows"]
)
def _paged_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    context_ptr,
    out_ptr,
    values_ptr,
    scales_ptr,
    acc_ptr,
    maximum_ptr,
    total_ptr,
    num_rows,
    num_queries,
    table_width,
    max_groups,
    resident,
    padded_rows,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_GQA: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    SHARED: tl.constexpr,
    FP8: tl.constexpr,
    QUANTISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (kv head, row and query tile, p). SHARED: programs p < P take groups p, p + P, ... of their
    row, and P is the row's part of `resident` programs, rounded down so that all run at once; programs p
    >= P have nothing to do.
    """
    launch_next(PDL)
    GQA: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    QUERIES: tl.constexpr = ROWS // PADDED_GQA
    query_tiles = tl.cdiv(num_queries, QUERIES)
    row, query_tile = tl.program_id(1) // query_tiles, tl.program_id(1) % query_tiles
    kv_head = tl.program_id(0)  # fastest, because the heads of a token are neighbours in memory
    query = query_tile * QUERIES + tl.arange(0, ROWS) // PADDED_GQA
    member = tl.arange(0, ROWS) % PADDED_GQA
    valid = (query < num_queries) & (member < GQA)
    column = tl.arange(0, HEAD_DIM)
    q_row = ((row * num_queries + query) * NUM_HEADS + kv_head * GQA + member).to(tl.int64)
    q_offset = q_row[:, None] * HEAD_DIM + column[None, :]
    row_table_ptr = table_ptr + row.to(tl.int64) * table_width
    context = tl.load(context_ptr + row).to(tl.int32)
    block = tile_blocks(
        row_table_ptr, tl.program_id(2) * GROUP, table_width, BLOCK_SIZE, TILE
    )  # whatever the row's length
    last_query = tl.minimum(num_queries, query_tile * QUERIES + QUERIES)
    end = tl.where(context < 0, 0, context + last_query)
    if SHARED:
        groups = tl.cdiv(end, GROUP)
        work = _groups_in_batch(context_ptr, num_rows, num_queries, GROUP) * query_tiles * NUM_KV_HEADS
        stride = tl.maximum(1, tl.minimum(groups * resident // tl.maximum(1, work), tl.num_programs(2)))
    if FP8:
        scale *= tl.load(k_scale_ptr + kv_head)
        v_scale = tl.load(v_scale_ptr + kv_head)
    wait_previous(PDL)
    q = tl.load(q_ptr + q_offset, mask=valid[:, None], other=0.0)
    if FP8:
        q = as_fp8_query(q)
    q = tl.trans(q)

    group_acc, group_maximum, group_total = fresh_keys(ROWS, HEAD_DIM, FP8)
    if SHARED:
        TILES: tl.constexpr = GROUP // TILE
        first = tl.program_id(2)
        mine = tl.where(first < tl.minimum(stride, groups), tl.cdiv(groups - first, stride), 0)
        ends_row = first + (mine - 1) * stride == groups - 1  # and its last group may have fewer tiles
        num_tiles = mine * TILES - tl.where((mine > 0) & ends_row, (groups * GROUP - end) // TILE, 0)
        for i in range(0, num_tiles):
            # One flat loop, so that loads run ahead from one group into the next.
            group = first + i // TILES * stride
            start = group * GROUP + i % TILES * TILE
            group_acc, group_maximum, group_total = attend_keys(
                q,
                group_acc,
                group_maximum,
                group_total,
                context + query,
                start,
                end,
                block,
                k_cache_ptr,
                v_cache_ptr,
                kv_head,
                scale,
                HEAD_DIM,
                NUM_KV_HEADS,
                BLOCK_SIZE,
                TILE,
                GROUP,
                FP8,
            )
            following = (first + (i + 1) // TILES * stride) * GROUP + (i + 1) % TILES * TILE
            block = tile_blocks(row_table_ptr, following, table_width, BLOCK_SIZE, TILE)
            if ((start + TILE) % GROUP == 0) | (start + TILE >= end):
                partial = q_row * max_groups + group
                tl.store(
                    acc_ptr + partial[:, None] * HEAD_DIM + column[None, :],
                    by_rows(group_acc, FP8),
                    mask=valid[:, None],
                )
                tl.store(maximum_ptr + partial, group_maximum, mask=valid)
                tl.store(total_ptr + partial, tl.max(group_total, axis=0), mask=valid)
    else:
        acc, maximum, total = fresh(ROWS, HEAD_DIM)
        for start in range(0, end, TILE):
            group_acc, group_maximum, group_total = attend_keys(
                q,
                group_acc,
                group_maximum,
                group_total,
                context + query,
                start,
                end,
                block,
                k_cache_ptr,
                v_cache_ptr,
                kv_head,
                scale,
                HEAD_DIM,
                NUM_KV_HEADS,
                BLOCK_SIZE,
                TILE,
                GROUP,
                FP8,
            )
            block = tile_blocks(row_table_ptr, start + TILE, table_width, BLOCK_SIZE, TILE)
            if ((start + TILE) % GROUP == 0) | (start + TILE >= end):
                acc, maximum, total = fold(
                    acc, maximum, total, by_rows(group_acc, FP8), group_maximum, tl.max(group_total, axis=0)
                )
        out = normalised(acc, total)
        if FP8:
            out *= v_scale
        _store_heads(
            out, q_row, valid, out_ptr, values_ptr, scales_ptr, padded_rows, NUM_HEADS, HEAD_DIM, QUANTISE
        )


@triton.jit
def _store_heads(
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
    """Rows of `out` are heads of tokens, `q_row` their number; quantised, a head is a group: what is rounded
    to 16 bits first.
    """
    offset = q_row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    if QUANTISE:
        values, scales = quantise_groups(out.to(out_ptr.dtype.element_ty).to(tl.float32))
        tl.store(values_ptr + offset, values, mask=valid[:, None])
        tl.store(scales_ptr + q_row % NUM_HEADS * padded_rows + q_row // NUM_HEADS, scales, mask=valid)
    else:
        tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _load_partials(
    acc_ptr, maximum_ptr, total_ptr, first, valid, HEAD_DIM: tl.constexpr, BATCH: tl.constexpr
):
    """BATCH groups' results from `first` on, loaded before any is used. Those that do not exist are whatever
    lies there.
    """
    accs, maxima, totals = (), (), ()
    for i in tl.static_range(BATCH):
        offset = (first + i)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        accs = accs + (tl.load(acc_ptr + offset, mask=valid[:, None], other=0.0),)
        maxima = maxima + (tl.load(maximum_ptr + first + i, mask=valid, other=0.0),)
        totals = totals + (tl.load(total_ptr + first + i, mask=valid, other=0.0),)
    return accs, maxima, totals


@triton.jit
def _fold_partials(acc, maximum, total, accs, maxima, totals, first, end, BATCH: tl.constexpr):
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
    FP8: tl.constexpr,
    QUANTISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (query, kv head) folds the groups one by one. The buffers hold `max_groups`, a multiple
    of BATCH.
    """
    launch_next(PDL)
    GQA: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    query_row = tl.program_id(0)
    member = tl.arange(0, PADDED_GQA)
    valid = member < GQA
    q_row = query_row.to(tl.int64) * NUM_HEADS + tl.program_id(1) * GQA + member
    partial = q_row * max_groups
    context = tl.load(context_ptr + query_row // num_queries).to(tl.int32)
    if FP8:
        v_scale = tl.load(v_scale_ptr + tl.program_id(1))
    wait_previous(PDL)
    accs, maxima, totals = _load_partials(acc_ptr, maximum_ptr, total_ptr, partial, valid, HEAD_DIM, BATCH)
    num_groups = tl.where(context < 0, 0, (context + query_row % num_queries) // GROUP + 1)
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
    _store_heads(
        out, q_row, valid, out_ptr, values_ptr, scales_ptr, padded_rows, NUM_HEADS, HEAD_DIM, QUANTISE
    )


@dataclass(frozen=True)
class Launch:
    """How the work is cut up; no choice changes a bit."""

    programs: int  # per row, query tile and kv head, at most
    stages: int  # tiles in flight
    registers: int | None = None  # at most, per thread: fewer let more programs run at once
    warps: int | None = None  # None: as `num_warps` says
    resident: int | None = None  # None: RESIDENT or FP8_RESIDENT

    def num_warps(self, rows: int, fp8: bool) -> int:
        """With four, products of more than 8 rows run asynchronously, and from Triton 3.7 on those of 8 as
        well. With an E4M3 cache none may: see attention_tiles.py.
        """
        return self.warps or (4 if rows <= MIN_ROWS and not (fp8 and TRITON_VERSION >= (3, 7)) else 2)

    def options(self, rows: int, head_dim: int, q_bytes: int, kv_bytes: int) -> dict:
        """`q_bytes` and `kv_bytes`: of one number. Queries lie in shared memory, and what they gather passes
        through it.
        """
        held, stage = rows * head_dim * (q_bytes + 4), 2 * TILE * head_dim * kv_bytes
        options = launch_options(
            self.num_warps(rows, kv_bytes == 1), self.stages, stage_bytes=stage, held_bytes=held
        )
        return options | ({"maxnreg": self.registers} if self.registers else {})


def default_launch(processors: int, tiles: int, max_groups: int) -> Launch:
    """`tiles` counts (row, query tile, kv head). The lengths are not known here: a captured graph serves them
    all.
    """
    if tiles <= processors:
        return Launch(min(max_groups, FILL * processors // tiles), stages=3)
    return Launch(
        1, stages=4 if tiles <= 4 * processors else 3
    )  # with three, more programs fit a multiprocessor


def rows_per_program(num_queries: int, padded_gqa: int) -> int:
    return max(padded_gqa, MIN_ROWS, min(MAX_ROWS, next_power_of_2(num_queries * padded_gqa)))


def partial_bytes(
    rows: int, queries: int, heads: int, kv_heads: int, head_dim: int, table_tokens: int, processors: int
) -> int:
    """What the groups' partial results take where programs share rows; block tables address `table_tokens`
    tokens.
    """
    padded_gqa, max_groups = next_power_of_2(heads // kv_heads), cdiv(table_tokens, GROUP)
    tiles = rows * cdiv(queries, rows_per_program(queries, padded_gqa) // padded_gqa) * kv_heads
    if default_launch(processors, tiles, max_groups).programs == 1:
        return 0
    return rows * queries * heads * cdiv(max_groups, COMBINE_BATCH) * COMBINE_BATCH * (head_dim + 2) * 4


def paged_attention_triton(
    q_RQHD,
    k_cache,
    v_cache,
    block_table_RB,
    context_len_R,
    launch: Launch | None = None,
    k_scale_H=None,
    v_scale_H=None,
    quantise=False,
):
    """`[R, Q, Hq, D]`; with `quantise` the R x Q rows of all heads as a product takes them, which needs heads
    of GROUP dimensions.
    """
    num_rows, num_queries, num_heads, head_dim = q_RQHD.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    padded_gqa = next_power_of_2(num_heads // num_kv_heads)
    rows = rows_per_program(num_queries, padded_gqa)
    row_tiles = num_rows * cdiv(num_queries, rows // padded_gqa)
    max_groups = cdiv(block_table_RB.shape[1] * block_size, GROUP)
    launch = launch or default_launch(multiprocessors(q_RQHD.device), row_tiles * num_kv_heads, max_groups)
    fp8, out = (
        k_cache.dtype == E4M3,
        torch.empty_like(q_RQHD) if not quantise else q_RQHD,
    )  # of which only the type is read then
    rows_out = (
        QuantisedRows.empty(num_rows * num_queries, num_heads * head_dim, q_RQHD.dtype, q_RQHD.device)
        if quantise
        else None
    )
    values, scales, padded_rows = (
        (rows_out.values_MK, rows_out.scales_GM, len(rows_out.values_MK)) if quantise else (None, None, 0)
    )
    v_cache = v_cache.view(torch.int16) if fp8 else v_cache
    resident = launch.resident or (FP8_RESIDENT if fp8 else RESIDENT)
    acc = maximum = total = None
    if launch.programs > 1:
        max_groups = cdiv(max_groups, COMBINE_BATCH) * COMBINE_BATCH
        partials = (num_rows, num_queries, num_heads, max_groups)
        acc = torch.empty(*partials, head_dim, dtype=torch.float32, device=q_RQHD.device)
        maximum, total = torch.empty(2, *partials, dtype=torch.float32, device=q_RQHD.device)
    _paged_attention_kernel[(num_kv_heads, row_tiles, launch.programs)](
        q_RQHD,
        k_cache,
        v_cache,
        k_scale_H,
        v_scale_H,
        block_table_RB,
        context_len_R,
        out,
        values,
        scales,
        acc,
        maximum,
        total,
        num_rows,
        num_queries,
        block_table_RB.shape[1],
        max_groups,
        resident * multiprocessors(q_RQHD.device),
        padded_rows,
        head_dim**-0.5 * LOG2E,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        PADDED_GQA=padded_gqa,
        TILE=TILE,
        GROUP=GROUP,
        SHARED=launch.programs > 1,
        FP8=fp8,
        QUANTISE=quantise,
        **launch.options(rows, head_dim, q_RQHD.itemsize, k_cache.itemsize),
    )
    if launch.programs > 1:
        _combine_kernel[(num_rows * num_queries, num_kv_heads)](
            acc,
            maximum,
            total,
            context_len_R,
            v_scale_H,
            out,
            values,
            scales,
            num_queries,
            max_groups,
            padded_rows,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            PADDED_GQA=padded_gqa,
            GROUP=GROUP,
            BATCH=COMBINE_BATCH,
            FP8=fp8,
            QUANTISE=quantise,
            **launch_options(num_warps=4),
        )
    return rows_out if quantise else out


def paged_attention(
    q_RQHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table_RB: torch.Tensor,
    context_len_R: torch.Tensor,
    k_scale_H: torch.Tensor | None = None,
    v_scale_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of `q [R, Q, Hq, D]` with scale 1 / sqrt(D); the new tokens' K and V are already in the
    cache.

    `block_table_RB` int32; `context_len_R` is the absolute position of each row's first query, negative =
    inactive.
    """
    run = paged_attention_triton if q_RQHD.is_cuda else paged_attention_reference
    return run(
        q_RQHD, k_cache, v_cache, block_table_RB, context_len_R, k_scale_H=k_scale_H, v_scale_H=v_scale_H
    )


def paged_attention_quantised(
    q_RQHD, k_cache, v_cache, block_table_RB, context_len_R, k_scale_H=None, v_scale_H=None
) -> QuantisedRows:
    """`paged_attention`, its heads side by side, `[R x Q, Hq x D]`, as an FP8 product takes them."""
    if q_RQHD.is_cuda and q_RQHD.shape[-1] == QUANTISED_GROUP:
        return paged_attention_triton(
            q_RQHD, k_cache, v_cache, block_table_RB, context_len_R, None, k_scale_H, v_scale_H, quantise=True
        )
    out_RQHD = paged_attention(q_RQHD, k_cache, v_cache, block_table_RB, context_len_R, k_scale_H, v_scale_H)
    return quantise_rows(out_RQHD.flatten(0, 1).flatten(1))
