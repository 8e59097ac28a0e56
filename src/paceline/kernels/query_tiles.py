"""Which queries and keys meet in the CPU's attention: made once per forward pass, used by every layer.

    queries of a sequence   q0 q1 q2 | q3 q4 q5 | q6 - -       tiles; the last one is padded
    keys of a sequence      0 ...        319 | 320 ...         chunks
    pairs                   each tile with each chunk that it reaches; the last is as long as it must be

The rows of a tile are its queries times the query heads of a kv head. Sizes of tiles, of chunks and of the
pieces that end them are those which were found to keep a query's bits (`attention_shapes.py`).

A tree's node finds the keys behind its context through a table of its own, so it is alone in its tile; they
enter the same products at the same places as if the node's path were all there is.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from paceline.kernels.attention_shapes import Heads, attention_shapes
from paceline.kernels.row_step import TreeKeys
from paceline.kernels.row_tiles import mkldnn_enabled

# Bytes of keys and values that are gathered at a time; they should stay in the cache of a core.
GATHERED_BYTES = 2 << 20


@dataclass(frozen=True)
class Pairs:
    """Some pairs of a tile and a chunk, which have the same number of keys."""

    # The tile of each pair; None: all tiles in order.
    tile_P: torch.Tensor | None
    # Where the keys lie: blocks of the cache or, for trees, single slots of it.
    places: torch.Tensor
    by_slot: bool
    # Zero where a row sees a key, else minus infinity.
    mask_P1MN: torch.Tensor

    def gather(self, cache: torch.Tensor) -> torch.Tensor:
        """Returns the pairs' keys or values, `[P, N, kv heads, D]`, in the cache's type."""
        lines = cache.flatten(0, 1).flatten(1) if self.by_slot else cache.flatten(1)
        return lines.index_select(0, self.places).view(self.mask_P1MN.shape[0], -1, *cache.shape[2:])


@dataclass(frozen=True, eq=False)
class QueryTiles:
    """Queries in tiles, and the keys of each: those up to its absolute position, in its block table."""

    # Below 0: the query has no keys.
    position_NQ: torch.Tensor
    block_table_NB: torch.Tensor
    block_size: int
    heads: Heads
    # Keys of a chunk, and of the pieces that its length is a multiple of.
    chunk_keys: int
    piece_keys: int
    # The query at each place of the tiles, and the place of each query; None: in order, without padding.
    query_S: torch.Tensor | None = None
    place_T: torch.Tensor | None = None
    # Of tree nodes: keys from position `context_N` on lie in these cache slots instead.
    context_N: torch.Tensor | None = None
    slots_ND: torch.Tensor | None = None

    @property
    def num_tiles(self) -> int:
        return len(self.position_NQ)

    @cached_property
    def _reach_N(self) -> torch.Tensor:
        """How many keys each tile reaches; one where it has none, so that nothing is empty."""
        return self.position_NQ.amax(1).clamp(min=0) + 1

    @cached_property
    def num_chunks(self) -> int:
        """How many chunks the longest tile reaches."""
        return -(-int(self._reach_N.max()) // self.chunk_keys)

    @cached_property
    def some_hidden(self) -> bool:
        """Whether some row sees no key at all."""
        return bool((self.position_NQ < 0).any())

    @cached_property
    def hidden_CN1M(self) -> torch.Tensor:
        """Which rows see no key of a chunk, by chunk and tile."""
        start_C11 = torch.arange(self.num_chunks).view(-1, 1, 1) * self.chunk_keys
        return (start_C11 > self.position_NQ).repeat_interleave(self.heads.group, 2).unsqueeze(2)

    @cached_property
    def place_P(self) -> torch.Tensor:
        """Each pair's place in a table of chunks by tiles; pairs with as many keys are neighbours."""
        return self._sorted_pairs[0]

    @cached_property
    def in_order(self) -> bool:
        """Whether the pairs are the tiles, in order."""
        return self.num_chunks == 1 and len(self.pairs) == 1

    @cached_property
    def _sorted_pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        start_C1 = torch.arange(self.num_chunks).unsqueeze(1) * self.chunk_keys
        keys_CN = (self._reach_N - start_C1).clamp(max=self.chunk_keys)
        keys_P = (keys_CN + self.piece_keys - 1).div(self.piece_keys, rounding_mode="floor") * self.piece_keys
        keys_P = keys_P.flatten()
        place_P = (keys_P > 0).nonzero().squeeze(1) if self.num_chunks > 1 else torch.arange(len(keys_P))
        keys_P = keys_P[place_P]
        if int(keys_P.max()) * len(keys_P) <= self._gathered_keys:
            return place_P, keys_P
        keys_P, order_P = keys_P.sort(stable=True)
        return place_P[order_P], keys_P

    @property
    def _gathered_keys(self) -> int:
        return GATHERED_BYTES // (2 * self.heads.kv * self.heads.dim * self.heads.dtype.itemsize)

    @cached_property
    def pairs(self) -> list[Pairs]:
        """All pairs, in the order of `place_P`, as many together as should be gathered at a time."""
        place_P, keys_P = self._sorted_pairs
        keys = keys_P.tolist()
        count = len(keys)
        if max(keys) * count <= self._gathered_keys:
            return [self._some_pairs(place_P, max(keys))]
        cuts = [0]
        for index in range(1, count):
            if keys[index] * (index + 1 - cuts[-1]) > self._gathered_keys:
                cuts.append(index)
        return [
            self._some_pairs(place_P[first:last], keys[last - 1])
            for first, last in zip(cuts, [*cuts[1:], count], strict=True)
        ]

    def _some_pairs(self, place_P: torch.Tensor, num_keys: int) -> Pairs:
        tile_P, chunk_P = place_P % self.num_tiles, place_P // self.num_tiles
        key_PN = (chunk_P * self.chunk_keys).unsqueeze(1) + torch.arange(num_keys)
        hidden_PQN = key_PN.unsqueeze(1) > self.position_NQ[tile_P].unsqueeze(2)
        # A row without any key is left out of the fold; here it must not divide by zero.
        hidden_PQN &= ~hidden_PQN.all(2, keepdim=True)
        mask_PQN = torch.zeros(hidden_PQN.shape, dtype=self.heads.dtype).masked_fill_(hidden_PQN, -torch.inf)
        if self.context_N is None:
            places = self._blocks(tile_P, chunk_P, num_keys)
        else:
            places = self._slots(tile_P, key_PN)
        return Pairs(
            None if len(tile_P) == self.num_tiles and self.num_chunks == 1 else tile_P,
            places.flatten(),
            self.context_N is not None,
            mask_PQN.repeat_interleave(self.heads.group, 1).unsqueeze(1),
        )

    def _blocks(self, tile_P: torch.Tensor, chunk_P: torch.Tensor, num_keys: int) -> torch.Tensor:
        first_P1 = (chunk_P * (self.chunk_keys // self.block_size)).unsqueeze(1)
        index_PB = first_P1 + torch.arange(num_keys // self.block_size)
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
        num_tiles, num_queries = self.position_NQ.shape
        out_NHQGD = out_NHMD.view(num_tiles, self.heads.kv, num_queries, self.heads.group, self.heads.dim)
        out_THD = out_NHQGD.transpose(1, 2).reshape(
            num_tiles * num_queries, self.heads.kv * self.heads.group, self.heads.dim
        )
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
    table_TB = block_table_RB.repeat_interleave(num_queries, 0)
    tiles = make_tiles(heads, block_size, torch.ones_like(position_T), position_T, table_TB)
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
    shapes = attention_shapes(heads, block_size, torch.get_num_threads(), mkldnn_enabled())
    keys = shapes.chunk_keys, shapes.piece_keys
    longest = int(length_S.max())
    size = next((size for size in shapes.tile_queries if size >= longest), shapes.tile_queries[-1])
    if size == longest and int(length_S.min()) == longest:
        return QueryTiles(position_T.view(-1, size), block_table_SB, block_size, heads, *keys)
    tiles_S = (length_S + size - 1) // size
    sequence_N = torch.arange(len(length_S)).repeat_interleave(tiles_S)
    first_tile_S, first_query_S = tiles_S.cumsum(0) - tiles_S, length_S.cumsum(0) - length_S
    begin_N = first_query_S[sequence_N] + (torch.arange(len(sequence_N)) - first_tile_S[sequence_N]) * size
    query_NQ = begin_N.unsqueeze(1) + torch.arange(size)
    # A tile that is not full repeats its sequence's last query.
    query_NQ = torch.minimum(query_NQ, (first_query_S + length_S - 1)[sequence_N].unsqueeze(1))
    shift_S = first_tile_S * size - first_query_S
    place_T = torch.arange(len(position_T)) + shift_S.repeat_interleave(length_S)
    table_NB = block_table_SB[sequence_N]
    return QueryTiles(position_T[query_NQ], table_NB, block_size, heads, *keys, query_NQ.flatten(), place_T)
