"""Attention of a few new queries per row over the paged KV cache: decoding (Q = 1), verification (Q = k + 1).

Query j of row r sits at absolute position context_len[r] + j and attends to keys 0 .. context_len[r] + j; a
row with context_len < 0 is inactive and gives zeros. The caches are [num_blocks, block_size, num_kv_heads,
head_dim].

A query's bits depend on its own sequence only, not on the batch, on Q, or on whether a prefill kernel
computed it (attention_tiles.py). With many rows one program walks its whole row and folds in registers. With
fewer, programs are spread over the rows in proportion to their lengths (paged_launch.py), those of one row
share its groups, and a second kernel folds their partial results (attention_combine.py). Both fold the same
numbers in the same order. Queries and the heads of a GQA group are packed into a tile's rows.
"""

import torch

from paceline.kernels.attention_combine import AttentionOutput, Partials, combine_partials, store_heads
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
from paceline.kernels.fp8_format import E4M3, QuantisedRows
from paceline.kernels.fp8_format import GROUP as QUANTISED_GROUP
from paceline.kernels.fp8_quantise import quantise_rows
from paceline.kernels.paged_launch import Launch, default_launch, rows_per_program
from paceline.kernels.triton_support import (
    cdiv,
    launch_next,
    multiprocessors,
    next_power_of_2,
    tl,
    triton,
    wait_previous,
)


def paged_attention_reference(
    q_RQHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table_RB: torch.Tensor,
    context_len_R: torch.Tensor,
    k_scale_H: torch.Tensor | None = None,
    v_scale_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """The reference of `paged_attention`: each query by itself."""
    num_queries = q_RQHD.shape[1]
    position_RQ = context_len_R.unsqueeze(1) + torch.arange(num_queries)
    position_RQ = torch.where(context_len_R.unsqueeze(1) < 0, -1, position_RQ)
    table = block_table_RB.repeat_interleave(num_queries, dim=0)
    out = attend_reference(
        q_RQHD.flatten(0, 1), position_RQ.flatten(), table, k_cache, v_cache, k_scale_H, v_scale_H
    )
    return out.view(q_RQHD.shape)


@triton.jit
def _groups_in_batch(context_ptr, num_rows, num_queries, GROUP: tl.constexpr):
    """Returns how many groups all rows have together."""
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
    """Programs (kv head, row and query tile, p).

    SHARED: programs p < P take groups p, p + P, ... of their row, and P is the row's part of `resident`
    programs, rounded down so that all run at once; programs p >= P have nothing to do.
    """
    launch_next(PDL)
    GQA: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    QUERIES: tl.constexpr = ROWS // PADDED_GQA
    query_tiles = tl.cdiv(num_queries, QUERIES)
    row, query_tile = tl.program_id(1) // query_tiles, tl.program_id(1) % query_tiles
    # The fastest axis, because the heads of a token are neighbours in memory.
    kv_head = tl.program_id(0)
    query = query_tile * QUERIES + tl.arange(0, ROWS) // PADDED_GQA
    member = tl.arange(0, ROWS) % PADDED_GQA
    valid = (query < num_queries) & (member < GQA)
    column = tl.arange(0, HEAD_DIM)
    q_row = ((row * num_queries + query) * NUM_HEADS + kv_head * GQA + member).to(tl.int64)
    q_offset = q_row[:, None] * HEAD_DIM + column[None, :]
    row_table_ptr = table_ptr + row.to(tl.int64) * table_width
    context = tl.load(context_ptr + row).to(tl.int32)
    # Loaded whatever the row's length.
    block = tile_blocks(row_table_ptr, tl.program_id(2) * GROUP, table_width, BLOCK_SIZE, TILE)
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
        # The program that ends the row may have fewer tiles in its last group.
        ends_row = first + (mine - 1) * stride == groups - 1
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
        store_heads(
            out, q_row, valid, out_ptr, values_ptr, scales_ptr, padded_rows, NUM_HEADS, HEAD_DIM, QUANTISE
        )


def paged_attention_triton(
    q_RQHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table_RB: torch.Tensor,
    context_len_R: torch.Tensor,
    launch: Launch | None = None,
    k_scale_H: torch.Tensor | None = None,
    v_scale_H: torch.Tensor | None = None,
    quantise: bool = False,
) -> torch.Tensor | QuantisedRows:
    """Launches `paged_attention`'s kernels; returns `[R, Q, Hq, D]`.

    With `quantise` it returns the R x Q rows of all heads as an FP8 product takes them, which needs heads of
    128 dimensions, those of a quantised group.
    """
    num_rows, num_queries, num_heads, head_dim = q_RQHD.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    fp8 = k_cache.dtype == E4M3
    padded_gqa = next_power_of_2(num_heads // num_kv_heads)
    rows = rows_per_program(num_queries, padded_gqa)
    row_tiles = num_rows * cdiv(num_queries, rows // padded_gqa)
    max_groups = cdiv(block_table_RB.shape[1] * block_size, GROUP)
    processors = multiprocessors(q_RQHD.device)
    launch = launch or default_launch(processors, row_tiles * num_kv_heads, max_groups)
    out = AttentionOutput.empty(q_RQHD, quantise)
    partials = Partials.empty(q_RQHD, max_groups) if launch.programs > 1 else None
    _paged_attention_kernel[(num_kv_heads, row_tiles, launch.programs)](
        q_RQHD,
        k_cache,
        v_cache.view(torch.int16) if fp8 else v_cache,
        k_scale_H,
        v_scale_H,
        block_table_RB,
        context_len_R,
        out.plain,
        out.values,
        out.scales,
        partials.acc if partials is not None else None,
        partials.maximum if partials is not None else None,
        partials.total if partials is not None else None,
        num_rows,
        num_queries,
        block_table_RB.shape[1],
        partials.max_groups if partials is not None else max_groups,
        launch.resident_programs(fp8, processors),
        out.padded_rows,
        head_dim**-0.5 * LOG2E,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        PADDED_GQA=padded_gqa,
        TILE=TILE,
        GROUP=GROUP,
        SHARED=partials is not None,
        FP8=fp8,
        QUANTISE=quantise,
        **launch.options(rows, head_dim, q_RQHD.itemsize, k_cache.itemsize),
    )
    if partials is not None:
        combine_partials(partials, context_len_R, v_scale_H, out, num_kv_heads, fp8)
    return out.result


def paged_attention(
    q_RQHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table_RB: torch.Tensor,
    context_len_R: torch.Tensor,
    k_scale_H: torch.Tensor | None = None,
    v_scale_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the attention of `q [R, Q, Hq, D]` with scale 1 / sqrt(D), in the same shape.

    The new tokens' K and V are already in the cache. `block_table_RB` is int32; `context_len_R` is the
    absolute position of each row's first query, negative for an inactive row.
    """
    run = paged_attention_triton if q_RQHD.is_cuda else paged_attention_reference
    return run(
        q_RQHD, k_cache, v_cache, block_table_RB, context_len_R, k_scale_H=k_scale_H, v_scale_H=v_scale_H
    )


def paged_attention_quantised(
    q_RQHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table_RB: torch.Tensor,
    context_len_R: torch.Tensor,
    k_scale_H: torch.Tensor | None = None,
    v_scale_H: torch.Tensor | None = None,
) -> QuantisedRows:
    """Returns `paged_attention`'s heads side by side, `[R x Q, Hq x D]`, as an FP8 product takes them."""
    if q_RQHD.is_cuda and q_RQHD.shape[-1] == QUANTISED_GROUP:
        return paged_attention_triton(
            q_RQHD, k_cache, v_cache, block_table_RB, context_len_R, None, k_scale_H, v_scale_H, quantise=True
        )
    out_RQHD = paged_attention(q_RQHD, k_cache, v_cache, block_table_RB, context_len_R, k_scale_H, v_scale_H)
    return quantise_rows(out_RQHD.flatten(0, 1).flatten(1))
