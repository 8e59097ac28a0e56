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
def tiles_before(end, first, stride, SHAPE: tl.constexpr):
    """Returns how many tiles begin before `end` in groups `first`, `first` + `stride`, ... of a program."""
    TILES: tl.constexpr = SHAPE.group // SHAPE.tile
    groups = tl.cdiv(end, SHAPE.group)
    mine = tl.where(first < tl.minimum(stride, groups), tl.cdiv(groups - first, stride), 0)
    # The program that ends the row may have fewer tiles in its last group.
    ends_row = first + (mine - 1) * stride == groups - 1
    return mine * TILES - tl.where((mine > 0) & ends_row, (groups * SHAPE.group - end) // SHAPE.tile, 0)


@triton.jit
def attend_nodes(q, state, query, position, start, end, block, nodes, keys, SHAPE: tl.constexpr):
    """Does what `attend_keys` does where each of a program's nodes has its own keys from the context on.

    Column c of `q` belongs to node `query[c]`. `nodes` are the table of the row's nodes `[queries, reach]`,
    its size, the context, and the program's first node.
    """
    QUERIES: tl.constexpr = SHAPE.rows // SHAPE.padded_gqa
    slots_ptr, num_queries, reach, context, first_query = nodes
    token = start + tl.arange(0, SHAPE.tile)
    behind = token - context
    shared_slot = block.to(tl.int64) * SHAPE.block_size + token % SHAPE.block_size
    for i in range(QUERIES):
        node = first_query + i
        line_ptr = slots_ptr + tl.minimum(node, num_queries - 1) * reach
        own_slot = tl.load(line_ptr + behind, mask=(behind >= 0) & (behind < reach), other=0)
        slot = tl.where(behind < 0, shared_slot, own_slot)
        node_acc, node_maximum, node_total = attend_slots(q, state, position, start, end, slot, keys, SHAPE)
        acc, maximum, total = state
        own = query == node
        if SHAPE.fp8:
            even = tl.where(own[None, :], node_acc[0], acc[0])
            acc = even, tl.where(own[None, :], node_acc[1], acc[1])
        else:
            acc = (tl.where(own[None, :], node_acc[0], acc[0]),)
        total = tl.where(own[None, :], node_total, total)
        state = acc, tl.where(own, node_maximum, maximum), total
    return state
