"""What paged attention does differently for the nodes of a tree.

A query's bits follow from the place at which each key enters a tile, so the key at absolute position p enters
tile p // TILE at place p % TILE for every node, as if its path were the whole text. Up to the tile that holds
the root all nodes of a row have the same keys and share their products; from it on each node's are gathered
through a table of its ancestors' slots, one node at a time:

    tile          0 .. t-1                 t                          t+1
    keys          the row's        the row's | ancestors'      ancestors' | none
    products      of all nodes          node by node, and only its own columns are taken

A tree is at most 16 deep, so it ends in the root's tile or the next.
"""

from paceline.kernels.attention_tiles import attend_slots
from paceline.kernels.triton_support import tl, triton


@triton.jit
def tiles_before(end, first, stride, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Returns how many tiles begin before `end` in groups `first`, `first` + `stride`, ... of a program."""
    TILES: tl.constexpr = GROUP // TILE
    groups = tl.cdiv(end, GROUP)
    mine = tl.where(first < tl.minimum(stride, groups), tl.cdiv(groups - first, stride), 0)
    # The program that ends the row may have fewer tiles in its last group.
    ends_row = first + (mine - 1) * stride == groups - 1
    return mine * TILES - tl.where((mine > 0) & ends_row, (groups * GROUP - end) // TILE, 0)


@triton.jit
def attend_nodes(
    q,
    acc,
    maximum,
    total,
    query,
    query_position,
    start,
    end,
    context,
    block,
    node_slots_ptr,
    first_query,
    num_queries,
    reach,
    k_cache_ptr,
    v_cache_ptr,
    kv_head,
    scale,
    HEAD_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Does what `attend_keys` does where each of the QUERIES nodes from `first_query` on has its own keys.

    Column c of `q` belongs to node `query[c]`; `node_slots_ptr` is the row's `[num_queries, reach]`.
    """
    token = start + tl.arange(0, TILE)
    behind = token - context
    shared_slot = block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
    for i in range(QUERIES):
        node = first_query + i
        line_ptr = node_slots_ptr + tl.minimum(node, num_queries - 1) * reach
        own_slot = tl.load(line_ptr + behind, mask=(behind >= 0) & (behind < reach), other=0)
        node_acc, node_maximum, node_total = attend_slots(
            q,
            acc,
            maximum,
            total,
            query_position,
            start,
            end,
            tl.where(behind < 0, shared_slot, own_slot),
            k_cache_ptr,
            v_cache_ptr,
            kv_head,
            scale,
            HEAD_DIM,
            NUM_KV_HEADS,
            TILE,
            GROUP,
            PAIRS,
        )
        own = query == node
        if PAIRS:
            even = tl.where(own[None, :], node_acc[0], acc[0])
            acc = even, tl.where(own[None, :], node_acc[1], acc[1])
        else:
            acc = (tl.where(own[None, :], node_acc[0], acc[0]),)
        maximum = tl.where(own, node_maximum, maximum)
        total = tl.where(own[None, :], node_total, total)
    return acc, maximum, total
