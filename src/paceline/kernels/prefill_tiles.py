"""Which queries a program of prefill attention takes; prefill_attention.py draws how chunks are packed."""

from paceline.kernels.triton_support import tl, triton


@triton.jit
def queries_of_tile(tile, cu_seqlens_ptr, num_sequences, QUERIES: tl.constexpr):
    """Returns a tile's sequence, its first token in q, its number of queries, and the tile's first query.

    The first query is not below the number of queries where a sequence has fewer tiles than it got.
    """
    # The last sequence whose first tile is not after this one.
    low, high = tile * 0, tile * 0 + num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_seqlens_ptr + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle - 1
    first_token = tl.load(cu_seqlens_ptr + low).to(tl.int32)
    length = tl.load(cu_seqlens_ptr + low + 1).to(tl.int32) - first_token
    return low, first_token, length, (tile - (first_token // QUERIES + low)) * QUERIES
