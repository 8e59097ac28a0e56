"""The kernel of `paged_attention.py`: one program's walk over the keys of a few queries."""

from paceline.kernels.attention_combine import load_partial, store_heads, store_partial
from paceline.kernels.attention_tiles import (
    as_fp8_query,
    attend_keys,
    by_rows,
    fold,
    fresh,
    fresh_keys,
    normalised,
    tile_blocks,
)
from paceline.kernels.tree_attention import attend_nodes, tiles_before
from paceline.kernels.triton_support import launch_next, tl, triton, wait_previous


@triton.jit
def _groups_in_batch(context_ptr, num_rows, reach, GROUP: tl.constexpr):
    """Returns how many groups all rows have together."""
    BATCH: tl.constexpr = 256
    groups = 0
    for first in range(0, num_rows, BATCH):
        row = first + tl.arange(0, BATCH)
        context = tl.load(context_ptr + row, mask=row < num_rows, other=-1).to(tl.int32)
        groups += tl.sum(tl.where(context < 0, 0, (context + reach - 1) // GROUP + 1), axis=0)
    return groups


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_queries",
        "reach",
        "table_width",
        "max_groups",
        "resident",
        "padded_rows",
    ]
)
def paged_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    context_ptr,
    depth_ptr,
    node_slots_ptr,
    out_ptr,
    values_ptr,
    scales_ptr,
    acc_ptr,
    maximum_ptr,
    total_ptr,
    num_rows,
    num_queries,
    reach,
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
    FAR: tl.constexpr,
    NEAR: tl.constexpr,
    TREE: tl.constexpr,
    FP8: tl.constexpr,
    QUANTISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (kv head, row and query tile, p).

    `reach` is how many positions from the context on queries may sit at. TREE: tiles from the context's on
    are taken by each node for itself.

    SHARED: programs p < P take groups p, p + P, ... of their row, and P is the row's part of `resident`
    programs, rounded down so that all run at once; programs p >= P have nothing to do. FAR: only the groups
    before the context's, which all queries see whole. NEAR: only those from the context's on, one program.
    Where programs do not share a row, a NEAR one continues from what a FAR one has folded.
    """
    launch_next(PDL)
    GQA: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    QUERIES: tl.constexpr = ROWS // PADDED_GQA
    query_tiles = tl.cdiv(num_queries, QUERIES)
    row, query_tile = tl.program_id(1) // query_tiles, tl.program_id(1) % query_tiles
    first_query = row.to(tl.int64) * num_queries
    # The fastest axis, because the heads of a token are neighbours in memory.
    kv_head = tl.program_id(0)
    query = query_tile * QUERIES + tl.arange(0, ROWS) // PADDED_GQA
    member = tl.arange(0, ROWS) % PADDED_GQA
    valid = (query < num_queries) & (member < GQA)
    column = tl.arange(0, HEAD_DIM)
    q_row = (first_query + query) * NUM_HEADS + kv_head * GQA + member
    q_offset = q_row[:, None] * HEAD_DIM + column[None, :]
    row_table_ptr = table_ptr + row.to(tl.int64) * table_width
    context = tl.load(context_ptr + row).to(tl.int32)
    nothing = context < 0
    context_group = tl.maximum(context, 0) // GROUP
    first = context_group if NEAR else tl.program_id(2)
    # Loaded whatever the row's length.
    block = tile_blocks(row_table_ptr, first * GROUP, table_width, BLOCK_SIZE, TILE)
    if TREE:
        query_position = context + tl.load(
            depth_ptr + first_query + query, mask=query < num_queries, other=0
        ).to(tl.int32)
        end = tl.where(nothing, 0, tl.max(query_position, axis=0) + 1)
        shared_end = tl.where(nothing, 0, context // TILE * TILE)
        node_slots_ptr += first_query * reach
    else:
        query_position = context + query
        last_query = tl.minimum(num_queries, query_tile * QUERIES + QUERIES)
        end = tl.where(nothing, 0, context_group * GROUP if FAR else context + last_query)
        shared_end = end
    if NEAR:
        stride = 1
    elif SHARED:
        groups = tl.cdiv(end, GROUP)
        work = _groups_in_batch(context_ptr, num_rows, reach, GROUP) * query_tiles * NUM_KV_HEADS
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
        if NEAR:
            num_tiles = tl.where(nothing, 0, tl.cdiv(end, TILE) - first * TILES)
            shared_tiles = tl.where(nothing, 0, shared_end // TILE - first * TILES)
        else:
            num_tiles = tiles_before(end, first, stride, TILE, GROUP)
            shared_tiles = tiles_before(shared_end, first, stride, TILE, GROUP) if TREE else num_tiles
        for i in range(0, shared_tiles):
            # One flat loop, so that loads run ahead from one group into the next.
            group = first + i // TILES * stride
            start = group * GROUP + i % TILES * TILE
            group_acc, group_maximum, group_total = attend_keys(
                q,
                group_acc,
                group_maximum,
                group_total,
                query_position,
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
                sums = by_rows(group_acc, FP8), group_maximum, tl.max(group_total, axis=0)
                store_partial(acc_ptr, maximum_ptr, total_ptr, *sums, partial, valid, HEAD_DIM)
        if TREE:
            for i in range(shared_tiles, num_tiles):
                group = first + i // TILES * stride
                start = group * GROUP + i % TILES * TILE
                group_acc, group_maximum, group_total = attend_nodes(
                    q,
                    group_acc,
                    group_maximum,
                    group_total,
                    query,
                    query_position,
                    start,
                    end,
                    context,
                    block,
                    node_slots_ptr,
                    query_tile * QUERIES,
                    num_queries,
                    reach,
                    k_cache_ptr,
                    v_cache_ptr,
                    kv_head,
                    scale,
                    HEAD_DIM,
                    NUM_KV_HEADS,
                    BLOCK_SIZE,
                    QUERIES,
                    TILE,
                    GROUP,
                    FP8,
                )
                following = (first + (i + 1) // TILES * stride) * GROUP + (i + 1) % TILES * TILE
                block = tile_blocks(row_table_ptr, following, table_width, BLOCK_SIZE, TILE)
                if ((start + TILE) % GROUP == 0) | (start + TILE >= end):
                    partial = q_row * max_groups + group
                    sums = by_rows(group_acc, FP8), group_maximum, tl.max(group_total, axis=0)
                    store_partial(acc_ptr, maximum_ptr, total_ptr, *sums, partial, valid, HEAD_DIM)
    else:
        acc, maximum, total = fresh(ROWS, HEAD_DIM)
        if NEAR:
            acc, maximum, total = load_partial(acc_ptr, maximum_ptr, total_ptr, q_row, valid, HEAD_DIM)
        for start in range(first * GROUP, shared_end, TILE):
            group_acc, group_maximum, group_total = attend_keys(
                q,
                group_acc,
                group_maximum,
                group_total,
                query_position,
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
        if TREE:
            for start in range(shared_end, end, TILE):
                group_acc, group_maximum, group_total = attend_nodes(
                    q,
                    group_acc,
                    group_maximum,
                    group_total,
                    query,
                    query_position,
                    start,
                    end,
                    context,
                    block,
                    node_slots_ptr,
                    query_tile * QUERIES,
                    num_queries,
                    reach,
                    k_cache_ptr,
                    v_cache_ptr,
                    kv_head,
                    scale,
                    HEAD_DIM,
                    NUM_KV_HEADS,
                    BLOCK_SIZE,
                    QUERIES,
                    TILE,
                    GROUP,
                    FP8,
                )
                block = tile_blocks(row_table_ptr, start + TILE, table_width, BLOCK_SIZE, TILE)
                if ((start + TILE) % GROUP == 0) | (start + TILE >= end):
                    sums = by_rows(group_acc, FP8), group_maximum, tl.max(group_total, axis=0)
                    acc, maximum, total = fold(acc, maximum, total, *sums)
        if FAR:
            store_partial(acc_ptr, maximum_ptr, total_ptr, acc, maximum, total, q_row, valid, HEAD_DIM)
        else:
            out = normalised(acc, total)
            if FP8:
                out *= v_scale
            store_heads(
                out, q_row, valid, out_ptr, values_ptr, scales_ptr, padded_rows, NUM_HEADS, HEAD_DIM, QUANTISE
            )
