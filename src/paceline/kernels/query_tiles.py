"""Which queries and keys meet in the CPU's attention: made once per forward pass, used by every layer.

    queries of a sequence   q0 q1 q2 | q3 q4 q5 | q6 - -       tiles; the last one is padded
    keys of a sequence      0 .. 127 | 128 .. 255 | 256 ..     chunks
    pairs                   each tile with each chunk that it reaches, chunk by chunk

The rows of a tile are its queries times the query heads of a kv head. A row's bits must not depend on how
many rows its tile has, so tiles have sizes that were tried out (`tile_queries`).

A tree's node finds the keys behind its context through a table of its own, so it is alone in its tile; they
enter the same products at the same places as if the node's path were all there is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch

from paceline.kernels.row_tiles import mkldnn_enabled
from paceline.kernels.tree_gather import TreeKeys
from paceline.kernels.triton_support import cdiv

# Keys taken at a time, rounded up to whole blocks. A product over them must not be cut up by BLAS.
CHUNK_KEYS = 128
# Rows of a tile at most: torch's kernel takes so many at a time.
TILE_ROWS = 32
# Rows of the tile that every other size is compared with.
SAFE_ROWS = 16


@dataclass(frozen=True)
class Heads:
    """The heads of one layer, and the type that attention is computed in."""

    # Query heads of a kv head.
    group: int
    kv: int
    dim: int
    dtype: torch.dtype

    @staticmethod
    def of(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> "Heads":
        """Returns the heads of queries in `dtype`."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return Heads(num_heads // num_kv_heads, num_kv_heads, head_dim, wide)


@dataclass(frozen=True)
class Pairs:
    """Some pairs of a tile and a chunk: the tile's index (None: all in order), where its keys lie, a mask."""

    tile_P: torch.Tensor | None
    # Blocks of the cache or, for trees, single slots of it.
    places: torch.Tensor
    by_slot: bool
    # Zero where a row sees a key, else minus infinity.
    mask_P1MN: torch.Tensor

    def gather(self, cache: torch.Tensor) -> torch.Tensor:
        """Returns the pairs' keys or values in the cache's type."""
        lines = cache.flatten(0, 1).flatten(1) if self.by_slot else cache.flatten(1)
        return lines.index_select(0, self.places)


@dataclass(frozen=True, eq=False)
class QueryTiles:
    """Queries in tiles, and the keys each attends to: those up to its absolute position, in its block table."""

    # Below 0: the query has no keys, or there is none.
    position_NQ: torch.Tensor
    block_table_NB: torch.Tensor
    block_size: int
    heads: Heads
    # The query at each place of the tiles, and the place of each query; None: in order, without padding.
    query_S: torch.Tensor | None = None
    place_T: torch.Tensor | None = None
    # Of tree nodes: keys from position `context_N` on lie in these cache slots instead.
    context_N: torch.Tensor | None = None
    slots_ND: torch.Tensor | None = None

    @property
    def num_tiles(self) -> int:
        """How many tiles there are."""
        return len(self.position_NQ)

    @property
    def chunk_keys(self) -> int:
        """The number of keys in a chunk."""
        return cdiv(CHUNK_KEYS, self.block_size) * self.block_size

    @cached_property
    def chunks_N(self) -> torch.Tensor:
        """How many chunks each tile reaches; one where it has no keys, so that nothing is empty."""
        return self.position_NQ.amax(1).div(self.chunk_keys, rounding_mode="floor").clamp(min=0) + 1

    @cached_property
    def num_chunks(self) -> int:
        """How many chunks the longest tile reaches."""
        return int(self.chunks_N.max())

    @cached_property
    def some_hidden(self) -> bool:
        """Whether some row sees no key at all."""
        return bool((self.position_NQ < 0).any())

    @cached_property
    def place_P(self) -> torch.Tensor:
        """Each pair's place in a table of chunks by tiles."""
        reached_CN = torch.arange(self.num_chunks).unsqueeze(1) < self.chunks_N
        return reached_CN.flatten().nonzero().squeeze(1)

    @cached_property
    def hidden_CN1M(self) -> torch.Tensor:
        """Which rows see no key of a chunk, by chunk and tile."""
        start_C11 = torch.arange(self.num_chunks).view(-1, 1, 1) * self.chunk_keys
        return (start_C11 > self.position_NQ).repeat_interleave(self.heads.group, 2).unsqueeze(2)

    def slices(self, size: int) -> Iterator[Pairs]:
        """Yields all pairs, chunk by chunk, at most `size` at a time."""
        whole = self._pairs
        count = len(whole.mask_P1MN)
        if count <= size:
            yield whole
            return
        tile_P = torch.arange(count) if whole.tile_P is None else whole.tile_P
        places = whole.places.unflatten(0, (count, -1))
        for first in range(0, count, size):
            few = slice(first, first + size)
            yield Pairs(tile_P[few], places[few].flatten(), whole.by_slot, whole.mask_P1MN[few])

    @cached_property
    def _pairs(self) -> Pairs:
        tile_P, chunk_P = self.place_P % self.num_tiles, self.place_P // self.num_tiles
        key_PN = (chunk_P * self.chunk_keys).unsqueeze(1) + torch.arange(self.chunk_keys)
        hidden_PQN = key_PN.unsqueeze(1) > self.position_NQ[tile_P].unsqueeze(2)
        # A row without any key is left out of the fold; here it must not divide by zero.
        hidden_PQN &= ~hidden_PQN.all(2, keepdim=True)
        mask_PQN = torch.zeros(hidden_PQN.shape, dtype=self.heads.dtype).masked_fill_(hidden_PQN, -torch.inf)
        places = self._slots(tile_P, key_PN) if self.context_N is not None else self._blocks(tile_P, chunk_P)
        return Pairs(
            None if len(tile_P) == self.num_tiles else tile_P,
            places.flatten(),
            self.context_N is not None,
            mask_PQN.repeat_interleave(self.heads.group, 1).unsqueeze(1),
        )

    def _blocks(self, tile_P: torch.Tensor, chunk_P: torch.Tensor) -> torch.Tensor:
        blocks = self.chunk_keys // self.block_size
        index_PB = (chunk_P * blocks).unsqueeze(1) + torch.arange(blocks)
        # Past the table there are only hidden keys.
        return self.block_table_NB[tile_P.unsqueeze(1), index_PB.clamp_(max=self.block_table_NB.shape[1] - 1)]

    def _slots(self, tile_P: torch.Tensor, key_PN: torch.Tensor) -> torch.Tensor:
        inside_PN = (key_PN // self.block_size).clamp(max=self.block_table_NB.shape[1] - 1)
        block_PN = self.block_table_NB[tile_P.unsqueeze(1), inside_PN].long()
        behind_PN = key_PN - self.context_N[tile_P].unsqueeze(1)
        own_PN = self.slots_ND[tile_P].gather(1, behind_PN.clamp(0, self.slots_ND.shape[1] - 1))
        return torch.where(behind_PN < 0, block_PN * self.block_size + key_PN % self.block_size, own_PN)

    def gather(self, q_THD: torch.Tensor) -> torch.Tensor:
        """Returns the queries as tiles, `[N, kv heads, rows, D]`."""
        if self.query_S is not None:
            q_THD = q_THD.index_select(0, self.query_S)
        num_tiles, num_queries = self.position_NQ.shape
        q_NQHGD = q_THD.view(num_tiles, num_queries, self.heads.kv, self.heads.group, -1)
        return q_NQHGD.transpose(1, 2).reshape(num_tiles, self.heads.kv, num_queries * self.heads.group, -1)

    def scatter(self, out_NHMD: torch.Tensor) -> torch.Tensor:
        """Returns the tiles' rows as queries again, `[T, H, D]`."""
        num_heads = self.heads.kv * self.heads.group
        out_NHQGD = out_NHMD.unflatten(2, (-1, self.heads.group))
        out_THD = out_NHQGD.transpose(1, 2).reshape(-1, num_heads, self.heads.dim)
        return out_THD if self.place_T is None else out_THD.index_select(0, self.place_T)


def decode_tiles(
    heads: Heads,
    block_size: int,
    num_queries: int,
    block_table_RB: torch.Tensor,
    context_len_R: torch.Tensor,
    tree: TreeKeys | None = None,
) -> QueryTiles:
    """Returns the tiles of Q queries per row; the arguments are those of `paged_attention`."""
    depth_RQ = torch.arange(num_queries) if tree is None else tree.depth_RQ
    context_R1 = context_len_R.unsqueeze(1)
    position_T = torch.where(context_R1 < 0, -1, context_R1 + depth_RQ).flatten()
    if tree is None:
        length_R = torch.full_like(context_len_R, num_queries)
        return make_tiles(heads, block_size, length_R, position_T, block_table_RB)
    tiles = make_tiles(
        heads,
        block_size,
        torch.ones_like(position_T),
        position_T,
        block_table_RB.repeat_interleave(num_queries, 0),
    )
    context_N = context_len_R.repeat_interleave(num_queries)
    return replace(tiles, context_N=context_N, slots_ND=tree.slots_RQD.flatten(0, 1))


def prefill_tiles(
    heads: Heads,
    block_size: int,
    num_tokens: int,
    block_table_SB: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_len_S: torch.Tensor,
) -> QueryTiles:
    """Returns the tiles of packed chunks; the arguments are those of `prefill_attention`."""
    ends_S1 = cu_seqlens.long()
    length_S = ends_S1.diff()
    position_T = torch.arange(int(ends_S1[-1])) + (context_len_S - ends_S1[:-1]).repeat_interleave(length_S)
    if len(position_T) < num_tokens:
        # Tokens past the last sequence are padding: a sequence without keys.
        padding = num_tokens - len(position_T)
        length_S = torch.cat((length_S, length_S.new_tensor([padding])))
        position_T = torch.cat((position_T, position_T.new_full((padding,), -1)))
        block_table_SB = torch.cat((block_table_SB, block_table_SB[:1]))
    return make_tiles(heads, block_size, length_S, position_T, block_table_SB)


def make_tiles(
    heads: Heads,
    block_size: int,
    length_S: torch.Tensor,
    position_T: torch.Tensor,
    block_table_SB: torch.Tensor,
) -> QueryTiles:
    """Returns the tiles of packed queries: `length_S` of each sequence, one sequence after the other."""
    sizes = tile_queries(heads, block_size, torch.get_num_threads(), mkldnn_enabled())
    longest = int(length_S.max())
    size = next((size for size in sizes if size >= longest), sizes[-1])
    if size == longest and int(length_S.min()) == longest:
        return QueryTiles(position_T.view(-1, size), block_table_SB, block_size, heads)
    tiles_S = (length_S + size - 1) // size
    sequence_N = torch.arange(len(length_S)).repeat_interleave(tiles_S)
    first_tile_S, first_query_S = tiles_S.cumsum(0) - tiles_S, length_S.cumsum(0) - length_S
    begin_N = first_query_S[sequence_N] + (torch.arange(len(sequence_N)) - first_tile_S[sequence_N]) * size
    query_NQ = begin_N.unsqueeze(1) + torch.arange(size)
    # A tile that is not full repeats its sequence's last query.
    query_NQ = torch.minimum(query_NQ, (first_query_S + length_S - 1)[sequence_N].unsqueeze(1))
    shift_S = first_tile_S * size - first_query_S
    place_T = torch.arange(int(length_S.sum())) + shift_S.repeat_interleave(length_S)
    return QueryTiles(
        position_T[query_NQ], block_table_SB[sequence_N], block_size, heads, query_NQ.flatten(), place_T
    )


@cache
def tile_queries(heads: Heads, block_size: int, threads: int, mkldnn: bool) -> tuple[int, ...]:
    """Returns how many queries a tile may have, ascending.

    `threads` and `mkldnn` are how torch computes now; see `row_tiles.py`.
    """
    largest, safe = (max(1, rows // heads.group) for rows in (TILE_ROWS, SAFE_ROWS))
    generator = torch.Generator().manual_seed(0)
    rows = 2 * largest * heads.group
    keys = cdiv(CHUNK_KEYS, block_size) * block_size
    q, k, v = (
        torch.randn(2, heads.kv, length, heads.dim, generator=generator).to(heads.dtype)
        for length in (rows, keys, keys)
    )
    hidden = torch.rand(2, 1, rows, keys, generator=generator) < 0.3
    mask = torch.zeros(hidden.shape, dtype=heads.dtype).masked_fill_(hidden, -torch.inf)

    def in_tiles(queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = queries * heads.group
        pieces = [
            flash(q[:, :, first : first + size], k, v, mask[:, :, first : first + size])
            for first in range(0, rows, size)
        ]
        return torch.cat([out for out, _ in pieces], 2), torch.cat([lse for _, lse in pieces], 2)

    def agrees(queries: int) -> bool:
        compared = 2 * largest // queries * queries * heads.group
        return all(
            torch.equal(x[:, :, :compared], y[:, :, :compared])
            for x, y in zip(in_tiles(queries), right, strict=True)
        )

    with torch.inference_mode():
        right = in_tiles(safe)
        return tuple(size for size in range(1, largest + 1) if size == safe or agrees(size))


def flash(
    q_PHMD: torch.Tensor, k_PHND: torch.Tensor, v_PHND: torch.Tensor, mask_P1MN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention and the log of each row's total weight, by torch's kernel for CPUs."""
    return torch._scaled_dot_product_flash_attention_for_cpu(q_PHMD, k_PHND, v_PHND, attn_mask=mask_P1MN)
