"""The kernel of `paged_attention.py`: one program's walk over the keys of a few queries."""

from paceline.kernels.attention_combine import load_partial, store_heads, store_partial
from paceline.kernels.attention_tiles import (
    Keys,
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
    cache,
    table_ptr,
    context_ptr,
    tree,
    out,
    partials,
    num_rows,
    num_queries,
    reach,
    table_width,
    max_groups,
    resident,
    padded_rows,
    scale,
    SHAPE: tl.constexpr,
    SHARED: tl.constexpr,
    FAR: tl.constexpr,
    NEAR: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (kv head, row and query tile, p).

    `reach` is how many positions from the context on queries may sit at. Of a tree, tiles from the context's
    on are taken by each node for itself.

    SHARED: programs p < P take groups p, p + P, ... of their row, and P is the row's part of `resident`
    programs, rounded down so that all run at once; programs p >= P have nothing to do. FAR: only the groups
    before the context's, which all queries see whole. NEAR: only those from the context's on, one program.
    Where programs do not share a row, a NEAR one continues from what a FAR one has folded.
    """
    launch_next(PDL)
    ROWS: tl.constexpr = SHAPE.rows
    DIM: tl.constexpr = SHAPE.head_dim
    TILE: tl.constexpr = SHAPE.tile
    GROUP: tl.constexpr = SHAPE.group
    GQA: tl.constexpr = SHAPE.heads // SHAPE.kv_heads
    QUERIES: tl.constexpr = ROWS // SHAPE.padded_gqa
    k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr = cache
    query_tiles = tl.cdiv(num_queries, QUERIES)
    row, query_tile = tl.program_id(1) // query_tiles, tl.program_id(1) % query_tiles
    first_query = row.to(tl.int64) * num_queries
    # The fastest axis, because the heads of a token are neighbours in memory.
    kv_head = tl.program_id(0)
    query = query_tile * QUERIES + tl.arange(0, ROWS) // SHAPE.padded_gqa
    member = tl.arange(0, ROWS) % SHAPE.padded_gqa
    valid = (query < num_queries) & (member < GQA)
    q_row = (first_query + query) * SHAPE.heads + kv_head * GQA + member
    q_offset = q_row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    row_table_ptr = table_ptr + row.to(tl.int64) * table_width
    context = tl.load(context_ptr + row).to(tl.int32)
    nothing = context < 0
    context_group = tl.maximum(context, 0) // GROUP
    first = context_group if NEAR else tl.program_id(2)
    # Loaded whatever the row's length.
    block = tile_blocks(row_table_ptr, first * GROUP, table_width, SHAPE)
    if tree is not None:
        depth = tl.load(tree.depth_RQ + first_query + query, mask=query < num_queries, other=0)
        position = context + depth.to(tl.int32)
        end = tl.where(nothing, 0, tl.max(position, axis=0) + 1)
        shared_end = tl.where(nothing, 0, context // TILE * TILE)
        slots_ptr = tree.slots_RQD + first_query * reach
        nodes = slots_ptr, num_queries, reach, context, query_tile * QUERIES
    else:
        position = context + query
        last_query = tl.minimum(num_queries, query_tile * QUERIES + QUERIES)
        end = tl.where(nothing, 0, context_group * GROUP if FAR else context + last_query)
        shared_end = end
    if NEAR:
        stride = 1
    elif SHARED:
        groups = tl.cdiv(end, GROUP)
        work = _groups_in_batch(context_ptr, num_rows, reach, GROUP) * query_tiles * SHAPE.kv_heads
        stride = tl.maximum(1, tl.minimum(groups * resident // tl.maximum(1, work), tl.num_programs(2)))
    if SHAPE.fp8:
        scale *= tl.load(k_scale_ptr + kv_head)
        v_scale = tl.load(v_scale_ptr + kv_head)
    keys = Keys(k_cache_ptr, v_cache_ptr, kv_head, scale)
    wait_previous(PDL)
    q = tl.load(q_ptr + q_offset, mask=valid[:, None], other=0.0)
    if SHAPE.fp8:
        q = as_fp8_query(q)
    q = tl.trans(q)

    group = fresh_keys(SHAPE)
    if SHARED:
        TILES: tl.constexpr = GROUP // TILE
        if NEAR:
            num_tiles = tl.where(nothing, 0, tl.cdiv(end, TILE) - first * TILES)
            shared_tiles = tl.where(nothing, 0, shared_end // TILE - first * TILES)
        else:
            num_tiles = tiles_before(end, first, stride, SHAPE)
            shared_tiles = tiles_before(shared_end, first, stride, SHAPE) if tree is not None else num_tiles
        for i in range(0, shared_tiles):
            # One flat loop, so that loads run ahead from one group into the next.
            number = first + i // TILES * stride
            start = number * GROUP + i % TILES * TILE
            group = attend_keys(q, group, position, start, end, block, keys, SHAPE)
            following = (first + (i + 1) // TILES * stride) * GROUP + (i + 1) % TILES * TILE
            block = tile_blocks(row_table_ptr, following, table_width, SHAPE)
            if ((start + TILE) % GROUP == 0) | (start + TILE >= end):
                store_partial(partials, by_rows(group, SHAPE), q_row * max_groups + number, valid, SHAPE)
        if tree is not None:
            for i in range(shared_tiles, num_tiles):
                number = first + i // TILES * stride
                start = number * GROUP + i % TILES * TILE
                group = attend_nodes(q, group, query, position, start, end, block, nodes, keys, SHAPE)
                following = (first + (i + 1) // TILES * stride) * GROUP + (i + 1) % TILES * TILE
                block = tile_blocks(row_table_ptr, following, table_width, SHAPE)
                if ((start + TILE) % GROUP == 0) | (start + TILE >= end):
                    store_partial(partials, by_rows(group, SHAPE), q_row * max_groups + number, valid, SHAPE)
    else:
        state = fresh(ROWS, DIM)
        if NEAR:
            state = load_partial(partials, q_row, valid, SHAPE)
        for start in range(first * GROUP, shared_end, TILE):
            group = attend_keys(q, group, position, start, end, block, keys, SHAPE)
            block = tile_blocks(row_table_ptr, start + TILE, table_width, SHAPE)
            if ((start + TILE) % GROUP == 0) | (start + TILE >= end):
                state = fold(state, by_rows(group, SHAPE))
        if tree is not None:
            for start in range(shared_end, end, TILE):
                group = attend_nodes(q, group, query, position, start, end, block, nodes, keys, SHAPE)
                block = tile_blocks(row_table_ptr, start + TILE, table_width, SHAPE)
                if ((start + TILE) % GROUP == 0) | (start + TILE >= end):
                    state = fold(state, by_rows(group, SHAPE))
        if FAR:
            store_partial(partials, state, q_row, valid, SHAPE)
        else:
            heads = normalised(state)
            if SHAPE.fp8:
                heads *= v_scale
            store_heads(heads, q_row, valid, out, padded_rows, SHAPE)
