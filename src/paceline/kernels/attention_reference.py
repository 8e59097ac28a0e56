"""The reference of both attention kernels: each query by itself over the paged cache. A CPU runs this.

A query's bits depend on its own sequence only. Keys are taken in steps of whole blocks, STEP_KEYS at a time,
from absolute position 0; every product is a `bmm` whose matrices have the same shape whatever the batch; a
step involves the rows that reach it and no others.

The cache must hold finite numbers everywhere (zeros where nothing was written): a hidden key has weight zero,
and zero times NaN is NaN. `rope_kv.py`'s reference keeps that promise.

A tree's node finds the keys behind its context through a table of its own (`TreeKeys`). They enter the same
products at the same places as if the node's path were all there is, so its bits are those of plain decoding.

A cache in E4M3 holds k / k_scale and v / v_scale, with a scale per kv head. K's is applied to the queries,
V's to the result.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.kernels.fp8_format import E4M3, from_e4m3
from paceline.kernels.triton_support import cdiv

# Keys taken at a time, rounded up to whole blocks.
STEP_KEYS = 64
# Queries taken at a time, to bound the memory of gathered keys and values.
SLICE_TOKENS = 128


@dataclass(frozen=True)
class QueryKeys:
    """Which keys each of T queries attends to: those up to its absolute position, in its block table."""

    # Below 0: none.
    position_T: torch.Tensor
    block_table_TB: torch.Tensor
    # Of tree nodes: keys from position `context_T` on lie in these cache slots instead.
    context_T: torch.Tensor | None = None
    slots_TD: torch.Tensor | None = None

    def of(self, queries: slice | torch.Tensor | None) -> "QueryKeys":
        """Returns the keys of some of the queries; None: of all."""
        if queries is None:
            return self
        if self.context_T is None:
            return QueryKeys(self.position_T[queries], self.block_table_TB[queries])
        tensors = self.position_T, self.block_table_TB, self.context_T, self.slots_TD
        return QueryKeys(*(x[queries] for x in tensors))

    def slots(self, start: int, stop: int, block_size: int) -> torch.Tensor:
        """Returns the cache slots of the keys at positions [start, stop), `[T, stop - start]`."""
        position_N = torch.arange(start, stop)
        inside_N = (position_N // block_size).clamp(max=self.block_table_TB.shape[1] - 1)
        slots_TN = self.block_table_TB[:, inside_N].long() * block_size + position_N % block_size
        if self.context_T is None:
            return slots_TN
        behind_TN = position_N - self.context_T.unsqueeze(1)
        deepest = self.slots_TD.shape[1] - 1
        return torch.where(behind_TN < 0, slots_TN, self.slots_TD.gather(1, behind_TN.clamp(0, deepest)))


def attend_reference(
    q_THD: torch.Tensor,
    keys: QueryKeys,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale_H: torch.Tensor | None = None,
    v_scale_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns attention of queries, each over its own keys; zeros where it has none."""
    if k_scale_H is not None:
        group = q_THD.shape[1] // k_cache.shape[2]
        wide_THD = q_THD.float() * k_scale_H.repeat_interleave(group).unsqueeze(1)
        out_THD = attend_reference(wide_THD, keys, k_cache, v_cache)
        return (out_THD * v_scale_H.repeat_interleave(group).unsqueeze(1)).to(q_THD.dtype)
    if len(q_THD) <= SLICE_TOKENS:
        return _attend_slice(q_THD, keys, k_cache, v_cache)
    slices = [slice(first, first + SLICE_TOKENS) for first in range(0, len(q_THD), SLICE_TOKENS)]
    return torch.cat([_attend_slice(q_THD[few], keys.of(few), k_cache, v_cache) for few in slices])


def _attend_slice(
    q_THD: torch.Tensor, keys: QueryKeys, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> torch.Tensor:
    position_T = keys.position_T
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads = k_cache.shape[2]
    wide = torch.float64 if q_THD.dtype == torch.float64 else torch.float32
    q_HTGD = (q_THD.to(wide) * head_dim**-0.5).view(num_tokens, num_kv_heads, -1, head_dim).transpose(0, 1)
    longest, shortest = int(position_T.max()), int(position_T.min())
    if longest < 0:
        return torch.zeros_like(q_THD)
    rows = None if shortest >= 0 else (position_T >= 0).nonzero().squeeze(1)
    # The first step starts the sums; every row that runs at all takes part in it.
    weighted, maximum, total = _step(_take(q_HTGD, rows), keys.of(rows), k_cache, v_cache, 0)
    if rows is not None:
        # Rows that do not run come out as zeros: nothing over a weight of one.
        weighted, maximum, total = (
            x.new_full((x.shape[0], num_tokens, *x.shape[2:]), fill).index_copy_(1, rows, x)
            for x, fill in ((weighted, 0.0), (maximum, 0.0), (total, 1.0))
        )
    step_keys = _step_keys(k_cache)
    for start in range(step_keys, longest + 1, step_keys):
        rows = None if shortest >= start else (position_T >= start).nonzero().squeeze(1)
        new_weighted, new_maximum, new_total = _step(
            _take(q_HTGD, rows), keys.of(rows), k_cache, v_cache, start
        )
        old_weighted, old_maximum, old_total = _take(weighted, rows), _take(maximum, rows), _take(total, rows)
        top = torch.maximum(old_maximum, new_maximum)
        old_scale, new_scale = (old_maximum - top).exp_(), (new_maximum - top).exp_()
        merged = (
            old_weighted * old_scale + new_weighted * new_scale,
            top,
            old_total * old_scale + new_total * new_scale,
        )
        if rows is None:
            weighted, maximum, total = merged
        else:
            for target, value in zip((weighted, maximum, total), merged, strict=True):
                target.index_copy_(1, rows, value)
    return (weighted / total).transpose(0, 1).reshape(num_tokens, num_heads, head_dim).to(q_THD.dtype)


def _step(
    q_HTGD: torch.Tensor, keys: QueryKeys, k_cache: torch.Tensor, v_cache: torch.Tensor, start: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (sum of weighted values, largest score, total weight) over the step's keys alone."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    step_keys = _step_keys(k_cache)
    position_T = keys.position_T
    wide = q_HTGD.dtype
    shape = (len(position_T), step_keys, num_kv_heads, head_dim)
    k, v = (_widened(x, wide).view(shape) for x in _step_keys_values(keys, k_cache, v_cache, start))
    scores_HTGN = q_HTGD.new_empty((*q_HTGD.shape[:3], step_keys))
    for head in range(num_kv_heads):
        torch.bmm(q_HTGD[head], k[:, :, head].transpose(1, 2), out=scores_HTGN[head])
    hidden_TN = torch.arange(start, start + step_keys) > position_T.unsqueeze(1)
    scores_HTGN.masked_fill_(hidden_TN.unsqueeze(1), -torch.inf)
    maximum = scores_HTGN.amax(-1, keepdim=True)
    weights_HTGN = scores_HTGN.sub_(maximum).exp_()
    weighted = torch.empty(q_HTGD.shape, dtype=wide)
    for head in range(num_kv_heads):
        torch.bmm(weights_HTGN[head], v[:, :, head], out=weighted[head])
    return weighted, maximum, weights_HTGN.sum(-1, keepdim=True)


def _step_keys_values(
    keys: QueryKeys, k_cache: torch.Tensor, v_cache: torch.Tensor, start: int
) -> list[torch.Tensor]:
    """The step's keys and values in the cache's type: by block where all keys lie in the block tables."""
    block_size = k_cache.shape[1]
    stop = start + _step_keys(k_cache)
    if keys.context_T is not None and stop > int(keys.context_T.min()):
        slots = keys.slots(start, stop, block_size).flatten()
        return [cache.flatten(0, 1).flatten(1).index_select(0, slots) for cache in (k_cache, v_cache)]
    blocks_TB = keys.block_table_TB[:, start // block_size : stop // block_size]
    missing = (stop - start) // block_size - blocks_TB.shape[1]
    blocks = (F.pad(blocks_TB, (0, missing)) if missing else blocks_TB).flatten()
    return [cache.flatten(1).index_select(0, blocks) for cache in (k_cache, v_cache)]


def _widened(x: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    return from_e4m3(x) if x.dtype == E4M3 else x.to(wide)


def _step_keys(k_cache: torch.Tensor) -> int:
    return cdiv(STEP_KEYS, k_cache.shape[1]) * k_cache.shape[1]


def _take(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return x if rows is None else x.index_select(1, rows)
