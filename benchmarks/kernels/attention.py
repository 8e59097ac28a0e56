"""Cases of attention over the paged KV cache: decode, verification and prefill.

Torch's equivalent is `scaled_dot_product_attention` over the same keys and values laid out contiguously: it
does not look pages up, and has the same bytes to read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from benchmarks.kernels.case import KernelCase, relative_error
from benchmarks.kernels.workload import DecodeSize, Operands, PrefillSize
from benchmarks.timing import copies_for
from paceline.kernels.fp8_format import from_e4m3, to_e4m3
from paceline.kernels.paged_attention import paged_attention
from paceline.kernels.prefill_attention import prefill_attention

BLOCK_SIZE = 16
KV_SCALE = 0.012  # of an FP8 cache: normal numbers then use most of E4M3's range
# Queries and attention weights are rounded to E4M3 too, which torch's equivalent does not do.
FP8_TOLERANCE = 0.08


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of one layer in pages, and the scales of an FP8 cache."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    table_RB: torch.Tensor
    scale_H: torch.Tensor | None

    @classmethod
    def random(cls, operands: Operands, rows: int, tokens: int, fp8: bool) -> "PagedKV":
        """Returns a cache in which each row's pages lie anywhere."""
        shape = operands.shape
        blocks = -(-tokens // BLOCK_SIZE)
        size = (rows * blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        k_cache = operands.random(*size)
        v_cache = operands.random(*size)
        table_RB = torch.randperm(rows * blocks).int().view(rows, blocks).to(operands.device)
        if not fp8:
            return cls(k_cache, v_cache, table_RB, None)
        scale_H = torch.full((shape.num_kv_heads,), KV_SCALE, device=operands.device)
        k_cache, v_cache = (to_e4m3(cache.float() / KV_SCALE) for cache in (k_cache, v_cache))
        return cls(k_cache, v_cache, table_RB, scale_H)

    def contiguous(self, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and values of each row's first tokens as `[R, kv heads, tokens, D]`."""
        return self._row_major(self.k_cache, tokens, dtype), self._row_major(self.v_cache, tokens, dtype)

    def _row_major(self, cache: torch.Tensor, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        wide = cache if self.scale_H is None else (from_e4m3(cache) * KV_SCALE).to(dtype)
        return wide[self.table_RB.long()].flatten(1, 2)[:, :tokens].transpose(1, 2).contiguous()


def attention_cases(operands: Operands) -> Iterator[KernelCase]:
    """Yields decode and verify steps over a cache in the policy's type."""
    for size in operands.workload.decode:
        yield _decode_case(operands, size, fp8=False)


def fp8_attention_cases(operands: Operands) -> Iterator[KernelCase]:
    """Yields decode and verify steps over an FP8 cache; torch's equivalent has twice the bytes to read."""
    for size in operands.workload.decode:
        yield _decode_case(operands, size, fp8=True)


def _decode_case(operands: Operands, size: DecodeSize, fp8: bool) -> KernelCase:
    shape = operands.shape
    tokens = size.context + size.queries
    kv_numbers = 2.0 * size.rows * tokens * shape.num_kv_heads * shape.head_dim
    kv_bytes = kv_numbers * (1 if fp8 else operands.dtype.itemsize)
    copies = copies_for(kv_bytes, operands.device)
    caches = [PagedKV.random(operands, size.rows, tokens, fp8) for _ in range(copies)]
    layers = [cache.contiguous(tokens, operands.dtype) for cache in caches]
    q_RQHD = operands.random(size.rows, size.queries, shape.num_heads, shape.head_dim)
    context_R = torch.full((size.rows,), size.context, dtype=torch.int32, device=operands.device)

    def attend(kv: PagedKV) -> torch.Tensor:
        return paged_attention(q_RQHD, kv.k_cache, kv.v_cache, kv.table_RB, context_R, kv.scale_H, kv.scale_H)

    return KernelCase(
        kernel="fp8-attention" if fp8 else "attention",
        size=str(size),
        copies=copies,
        run=lambda: [attend(kv) for kv in caches],
        run_torch=lambda: [_torch_attention(q_RQHD, k, v) for k, v in layers],
        error=lambda: relative_error(attend(caches[0]), _torch_attention(q_RQHD, *layers[0])),
        tolerance=FP8_TOLERANCE if fp8 else operands.tolerance,
        num_bytes=kv_bytes + 2 * q_RQHD.nbytes,
        flops=4.0 * shape.num_heads * shape.head_dim * size.rows * size.queries * size.context,
        fp8=fp8,
    )


def prefill_cases(operands: Operands) -> Iterator[KernelCase]:
    """Yields prompts and chunks of prompts, computed with the bits that decoding gives."""
    for size in operands.workload.prefill:
        yield _prefill_case(operands, size)


def _prefill_case(operands: Operands, size: PrefillSize) -> KernelCase:
    shape = operands.shape
    tokens = size.context + size.new
    kv = PagedKV.random(operands, size.sequences, tokens, fp8=False)
    k_RHND, v_RHND = kv.contiguous(tokens, operands.dtype)
    q_THD = operands.random(size.sequences * size.new, shape.num_heads, shape.head_dim)
    q_RQHD = q_THD.unflatten(0, (size.sequences, size.new))
    bounds_S1 = torch.arange(size.sequences + 1, dtype=torch.int32, device=operands.device) * size.new
    context_S = torch.full((size.sequences,), size.context, dtype=torch.int32, device=operands.device)

    def attend() -> torch.Tensor:
        return prefill_attention(q_THD, kv.k_cache, kv.v_cache, kv.table_RB, bounds_S1, context_S)

    seen = size.new * size.context + size.new**2 / 2
    return KernelCase(
        kernel="prefill",
        size=str(size),
        copies=1,
        run=attend,
        run_torch=lambda: _torch_attention(q_RQHD, k_RHND, v_RHND),
        error=lambda: relative_error(attend(), _torch_attention(q_RQHD, k_RHND, v_RHND).flatten(0, 1)),
        tolerance=operands.tolerance,
        num_bytes=kv.k_cache.nbytes + kv.v_cache.nbytes + 2 * q_THD.nbytes,
        flops=4.0 * shape.num_heads * shape.head_dim * size.sequences * seen,
    )


def _torch_attention(q_RQHD: torch.Tensor, k_RHND: torch.Tensor, v_RHND: torch.Tensor) -> torch.Tensor:
    """Returns the attention of each row's last queries, `[R, Q, H, D]`."""
    queries = q_RQHD.shape[1]
    mask = causal_lower_right(queries, k_RHND.shape[2]) if queries > 1 else None
    q_RHQD = q_RQHD.transpose(1, 2)
    return F.scaled_dot_product_attention(q_RHQD, k_RHND, v_RHND, mask, enable_gqa=True).transpose(1, 2)
