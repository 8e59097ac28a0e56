"""The shapes in which a CPU's attention keeps a query's bits, whatever else it is computed with.

Torch's kernel multiplies a tile's rows by a number of keys with BLAS, which chooses its code by the shape. So
the shapes are tried out once: tiles of other sizes, and more keys of which the last are hidden, are used if
every query comes out with the bits that it has in a tile of SAFE_ROWS rows over no more keys than it needs.
"""

from dataclasses import dataclass
from functools import cache

import torch

from paceline.kernels.operation import cdiv

# Rows of a tile at most: torch's kernel takes so many at a time.
TILE_ROWS = 32
# Rows of the tile that every other size is compared with.
SAFE_ROWS = 16
# Numbers of keys are multiples of this, rounded up to whole blocks, ...
PIECE_KEYS = 64
# ... up to as many as torch's kernel takes at a time.
CHUNK_PIECES = 8


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
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return Heads(num_heads // num_kv_heads, num_kv_heads, head_dim, wide)


@dataclass(frozen=True)
class AttentionShapes:
    """Numbers of queries that a tile may have, ascending; keys of a piece; keys of a chunk at most."""

    tile_queries: tuple[int, ...]
    piece_keys: int
    chunk_keys: int


def flash(
    q_PHMD: torch.Tensor, k_PHND: torch.Tensor, v_PHND: torch.Tensor, mask_P1MN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention and the log of each row's total weight, by torch's kernel for CPUs."""
    return torch._scaled_dot_product_flash_attention_for_cpu(q_PHMD, k_PHND, v_PHND, attn_mask=mask_P1MN)


@cache
def attention_shapes(heads: Heads, block_size: int, threads: int, mkldnn: bool) -> AttentionShapes:
    """Returns the shapes for these heads; `threads` and `mkldnn` as in `row_tiles.tile_sizes`."""
    with torch.inference_mode():
        return _Trial(heads, cdiv(PIECE_KEYS, block_size) * block_size).shapes()


class _Trial:
    """Random queries, each of which sees some of the keys, in tiles of all sizes over all numbers of keys."""

    def __init__(self, heads: Heads, piece_keys: int) -> None:
        self.piece_keys = piece_keys
        self.group = heads.group
        self.largest = max(1, TILE_ROWS // heads.group)
        self.safe = max(1, SAFE_ROWS // heads.group)
        self.num_queries = 2 * self.largest
        generator = torch.Generator().manual_seed(0)
        num_keys = CHUNK_PIECES * piece_keys
        self.q_MD = torch.randn(self.num_queries * heads.group, heads.dim, generator=generator).to(
            heads.dtype
        )
        # As they are gathered from the cache; one head is enough.
        self.k_NHD, self.v_NHD = (
            torch.randn(num_keys, heads.kv, heads.dim, generator=generator).to(heads.dtype) for _ in range(2)
        )
        seen_Q = torch.randint(1, num_keys + 1, (self.num_queries,), generator=generator)
        self.seen_M = seen_Q.repeat_interleave(heads.group)
        right = [self.in_tiles(self.safe, pieces) for pieces in range(1, CHUNK_PIECES + 1)]
        own_M = (self.seen_M - 1) // piece_keys
        self.right_MD, self.right_M = (
            torch.stack([x[index] for x in column])[own_M, torch.arange(len(own_M))]
            for index, column in ((0, right), (1, right))
        )

    def in_tiles(self, queries: int, pieces: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows' results in tiles of so many queries over so many keys, and log weights."""
        rows = queries * self.group
        num_keys = pieces * self.piece_keys
        padding = -len(self.q_MD) % rows
        q_NHMD = torch.cat((self.q_MD, self.q_MD[:padding])).view(-1, 1, rows, self.q_MD.shape[1])
        seen_N1M1 = torch.cat((self.seen_M, self.seen_M[:padding])).view(-1, 1, rows, 1)
        hidden = torch.arange(num_keys) >= seen_N1M1
        mask = torch.zeros(hidden.shape, dtype=q_NHMD.dtype).masked_fill_(hidden, -torch.inf)
        k, v = (
            x[:num_keys, :1].transpose(0, 1).expand(len(q_NHMD), -1, -1, -1) for x in (self.k_NHD, self.v_NHD)
        )
        out_NHMD, lse_NHM = flash(q_NHMD, k, v, mask)
        return out_NHMD.flatten(0, 2)[: len(self.q_MD)], lse_NHM.flatten()[: len(self.q_MD)]

    def agrees(self, queries: int, pieces: int) -> bool:
        """Whether every row that sees no more keys than these has the right bits."""
        out_MD, lse_M = self.in_tiles(queries, pieces)
        whole_M = self.seen_M <= pieces * self.piece_keys
        return torch.equal(out_MD[whole_M], self.right_MD[whole_M]) and torch.equal(
            lse_M[whole_M], self.right_M[whole_M]
        )

    def shapes(self) -> AttentionShapes:
        """Returns the longest chunk that safe tiles can have, and the tiles that agree up to there."""
        pieces = 1
        while pieces < CHUNK_PIECES and self.agrees(self.safe, pieces + 1):
            pieces += 1
        sizes = tuple(
            size
            for size in range(1, self.largest + 1)
            if size == self.safe or all(self.agrees(size, count) for count in range(1, pieces + 1))
        )
        return AttentionShapes(sizes, self.piece_keys, pieces * self.piece_keys)
