"""The reference of both attention kernels, over the paged cache. A CPU runs this.

A query's bits depend on its own sequence only. Queries of one sequence run in tiles, each over a chunk of
keys at a time from absolute position 0, in shapes that were found to keep their bits; a chunk's results are
folded with those before it, left to right (`query_tiles.py` says which queries and keys meet).

    pairs of          (tile 0, chunk 0)  (tile 1, chunk 0)  (tile 1, chunk 1)
    tile and chunk            |                  |                  |            one call of torch's kernel
                              v                  +---------+--------+
                            tile 0                       tile 1                  fold

The cache must hold finite numbers everywhere (zeros where nothing was written): a hidden key has weight zero,
and zero times NaN is NaN. `rope_kv.py`'s reference keeps that promise.

A cache in E4M3 holds k / k_scale and v / v_scale, with a scale per kv head. K's is applied to the queries,
V's to the result.
"""

import torch

from paceline.kernels.attention_shapes import flash
from paceline.kernels.fp8_format import E4M3, from_e4m3
from paceline.kernels.query_tiles import Pairs, QueryTiles


def attend_reference(
    q_THD: torch.Tensor,
    tiles: QueryTiles,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale_H: torch.Tensor | None = None,
    v_scale_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns attention of queries, each over its own keys; zeros where it has none."""
    if k_scale_H is not None:
        group = q_THD.shape[1] // k_cache.shape[2]
        wide_THD = q_THD.float() * k_scale_H.repeat_interleave(group).unsqueeze(1)
        out_THD = attend_reference(wide_THD, tiles, k_cache, v_cache)
        return (out_THD * v_scale_H.repeat_interleave(group).unsqueeze(1)).to(q_THD.dtype)
    wide = torch.float64 if q_THD.dtype == torch.float64 else torch.float32
    q_NHMD = tiles.gather(q_THD.to(wide))
    results = [_attend_pairs(q_NHMD, pairs, k_cache, v_cache) for pairs in tiles.pairs]
    out_PHMD, lse_PHM = (
        results[0] if len(results) == 1 else (torch.cat(x) for x in zip(*results, strict=True))
    )
    if tiles.num_chunks > 1:
        out_NHMD = _fold(out_PHMD, lse_PHM, tiles)
    else:
        out_NHMD = (
            out_PHMD if tiles.in_order else torch.empty_like(out_PHMD).index_copy_(0, tiles.place_P, out_PHMD)
        )
        if tiles.some_hidden:
            out_NHMD = out_NHMD.masked_fill(tiles.hidden_CN1M[0].unsqueeze(-1), 0.0)
    return tiles.scatter(out_NHMD).to(q_THD.dtype)


def _attend_pairs(
    q_NHMD: torch.Tensor, pairs: Pairs, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the attention of each pair's queries over its keys alone, and the log of their total weight."""
    q_PHMD = q_NHMD if pairs.tile_P is None else q_NHMD.index_select(0, pairs.tile_P)
    k_PHND, v_PHND = (
        _widened(pairs.gather(cache), q_NHMD.dtype).transpose(1, 2) for cache in (k_cache, v_cache)
    )
    return flash(q_PHMD, k_PHND, v_PHND, pairs.mask_P1MN)


def _fold(out_PHMD: torch.Tensor, lse_PHM: torch.Tensor, tiles: QueryTiles) -> torch.Tensor:
    """Returns each tile's attention over all its chunks; chunks that it does not reach weigh nothing."""
    shape = (tiles.num_chunks * tiles.num_tiles, *out_PHMD.shape[1:])
    place_P = tiles.place_P
    out_CNHMD = out_PHMD.new_zeros(shape).index_copy_(0, place_P, out_PHMD)
    lse_CNHM = lse_PHM.new_full(shape[:-1], -torch.inf).index_copy_(0, place_P, lse_PHM)
    out_CNHMD, lse_CNHM = (x.unflatten(0, (tiles.num_chunks, tiles.num_tiles)) for x in (out_CNHMD, lse_CNHM))
    lse_CNHM = lse_CNHM.masked_fill(tiles.hidden_CN1M, -torch.inf)
    weight_CNHM = (lse_CNHM - lse_CNHM.amax(0).clamp(min=torch.finfo(lse_PHM.dtype).min)).exp()
    weighted_CNHMD = out_CNHMD * weight_CNHM.unsqueeze(-1)
    weighted, total = weighted_CNHMD[0], weight_CNHM[0]
    # One after the other: a sum over the chunks could be taken in another order for another number of them.
    for chunk in range(1, tiles.num_chunks):
        weighted = weighted + weighted_CNHMD[chunk]
        total = total + weight_CNHM[chunk]
    # A query with keys has a total of one at least.
    return weighted / total.clamp(min=1.0).unsqueeze(-1)


def _widened(x: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    return from_e4m3(x) if x.dtype == E4M3 else x.to(wide)
