"""How many rows a CPU multiplies at a time, so that a row's bits do not depend on how many ran with it.

A BLAS chooses its code by the shape of a product: one row may be summed in another order than two, and with
some libraries so may any other number. Tiles of ROW_TILE rows, padded with zeros, always see the same shape.
That is dear where there are few rows, so other sizes are tried out once for each shape of weight, and used if
every row comes out with the bits that it has in a tile of ROW_TILE. What was tried is all that is used.
"""

from functools import cache, lru_cache

import torch
import torch.nn.functional as F

# Rows of the tile that every other size is compared with.
ROW_TILE = 16
# Sizes tried for weights of up to so many numbers: trying costs 12 ms for all products of a policy of a
# million parameters, and 0.2 s for a head of 28 million.
TRIED_SIZES = {1 << 19: (2, 4, *range(8, 129, 8)), 1 << 25: (4, 64)}


def multiply_rows(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """Returns x times weight transposed on a CPU; a row's bits depend on nothing but the row."""
    num_rows = x_MK.shape[0]
    sizes = tile_sizes(*weight_NK.shape, x_MK.dtype, torch.get_num_threads(), mkldnn_enabled())
    if num_rows in sizes or not num_rows:
        return F.linear(x_MK, weight_NK)
    tiles = cut_rows(num_rows, sizes)
    padding = sum(tiles) - num_rows
    if padding:
        x_MK = torch.cat((x_MK, x_MK.new_zeros(padding, x_MK.shape[1])))
    if len(tiles) == 1:
        return F.linear(x_MK, weight_NK)[:num_rows]
    return torch.cat([F.linear(tile_MK, weight_NK) for tile_MK in x_MK.split(tiles)])[:num_rows]


def mkldnn_enabled() -> bool:
    """Returns whether torch may take oneDNN for a product (`torch.backends.mkldnn.enabled`, but quicker)."""
    return torch._C._get_mkldnn_enabled()


@lru_cache(maxsize=4096)
def cut_rows(num_rows: int, sizes: tuple[int, ...]) -> list[int]:
    """Returns the tiles that hold the rows: as many of the largest as are full, and one for the rest."""
    full, rest = divmod(num_rows, sizes[-1])
    return [sizes[-1]] * full + ([next(size for size in sizes if size >= rest)] if rest else [])


@cache
def tile_sizes(width: int, depth: int, dtype: torch.dtype, threads: int, mkldnn: bool) -> tuple[int, ...]:
    """Returns the numbers of rows that may be multiplied at once, ascending, for a weight of this shape.

    `threads` and `mkldnn` are how torch computes now; another library or division of work is tried anew.
    """
    numbers = width * depth
    candidates = next((sizes for limit, sizes in TRIED_SIZES.items() if numbers <= limit), ())
    if not candidates:
        return (ROW_TILE,)
    generator = torch.Generator().manual_seed(0)
    num_rows = -(-max(candidates) // ROW_TILE) * ROW_TILE
    x_MK = torch.randn(num_rows, depth, generator=generator).to(dtype)
    weight_NK = torch.randn(width, depth, generator=generator).to(dtype)
    with torch.inference_mode():
        right_MN = torch.cat([F.linear(tile_MK, weight_NK) for tile_MK in x_MK.split(ROW_TILE)])
        agreeing = [size for size in candidates if _agrees(size, x_MK, weight_NK, right_MN)]
    return tuple(sorted({ROW_TILE, *agreeing}))


def _agrees(size: int, x_MK: torch.Tensor, weight_NK: torch.Tensor, right_MN: torch.Tensor) -> bool:
    """Whether tiles of `size` rows, the first ones and the last ones, have the right bits."""
    return all(
        torch.equal(F.linear(x_MK[rows], weight_NK), right_MN[rows])
        for rows in (slice(0, size), slice(len(x_MK) - size, len(x_MK)))
    )
