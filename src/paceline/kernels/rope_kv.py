"""Between the QKV projection and attention: optional QK-norm, RoPE, and the write of K and V into the cache.

    qkv[t] = [ q heads | k heads | v heads ]      slot_mapping[t] = block * block_size + offset; below 0: skip
                 |          |         |
             norm, rope  norm, rope   |
                 v          v         v
             q_out[t]    k_cache   v_cache        [num_blocks, block_size, num_kv_heads, head_dim]

RoPE follows Hugging Face's half-split convention ("rotate_half"): with halves (a, b) of a head, the result is
(a cos - b sin, b cos + a sin). The table holds cos and sin per absolute position, `[max_position, head_dim /
2]`.

A cache in E4M3 comes with a scale per kv head for K and for V: it holds k / k_scale and v / v_scale. The
projection may come in parts, `[parts, T, ...]` in float32 (fp8_linear.py): their sum in order is rounded to
the type that q has.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline.kernels.fp8_format import E4M3, e4m3_of, to_e4m3
from paceline.kernels.norm import rms_norm_reference
from paceline.kernels.operation import cdiv, next_power_of_2, reference_of
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous

# Heads of one token that one program rotates and stores.
HEADS_PER_PROGRAM = 8


@dataclass(frozen=True)
class TokenPlaces:
    """Where tokens are rotated to and stored: made once per forward pass, used by every layer on a CPU."""

    # Of `over_halves`.
    cos_T1D: torch.Tensor
    sin_T1D: torch.Tensor
    # The tokens that are stored (None: all), and the cache slots of those.
    kept: torch.Tensor | None
    slots: torch.Tensor

    @staticmethod
    def of(
        positions_T: torch.Tensor, slots_T: torch.Tensor, cos_PC: torch.Tensor, sin_PC: torch.Tensor
    ) -> "TokenPlaces":
        """Looks the positions up in the tables `[max_position, head_dim / 2]`; slots below 0 are skipped."""
        tables = over_halves(cos_PC[positions_T], sin_PC[positions_T])
        kept = (slots_T >= 0).nonzero().squeeze(-1)
        whole = len(kept) == len(slots_T)
        return TokenPlaces(*tables, None if whole else kept, slots_T if whole else slots_T[kept])


def rope_reference(x_THD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor) -> torch.Tensor:
    """Rotates heads `[T, H, D]` by per-token tables `[T, D / 2]`."""
    return rotate_heads(x_THD, *over_halves(cos_TC, sin_TC))


def over_halves(cos_TC: torch.Tensor, sin_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tables over a whole head, `[T, 1, D]`: (cos, cos) and (-sin, sin)."""
    cos, sin = cos_TC.unsqueeze(1), sin_TC.unsqueeze(1)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate_heads(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Rotates heads by the tables of `over_halves`."""
    wide = x_THD if x_THD.dtype == torch.float64 else x_THD.float()
    cos, sin = cos_T1D.to(wide.dtype), sin_T1D.to(wide.dtype)
    a, b = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((b, a), dim=-1) * sin).to(x_THD.dtype)


def rotate_and_store(
    qkv: torch.Tensor,
    places: TokenPlaces,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    k_scale_H: torch.Tensor | None = None,
    v_scale_H: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Does what `rope_and_write_kv` does, for tokens whose places are known."""
    num_tokens = qkv.shape[0]
    num_kv_heads, head_dim = k_cache.shape[2:]
    qk, v = qkv.view(num_tokens, -1, head_dim).split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    if q_norm_weight is not None:
        # Round once, after the rotation, as the kernel does.
        wide = qk if qk.dtype == torch.float64 else qk.float()
        q_normed = rms_norm_reference(wide[:, :num_heads], q_norm_weight, epsilon)
        qk = torch.cat((q_normed, rms_norm_reference(wide[:, num_heads:], k_norm_weight, epsilon)), dim=1)
    q, k = (
        rotate_heads(qk, places.cos_T1D, places.sin_T1D)
        .to(dtype or qkv.dtype)
        .split([num_heads, num_kv_heads], dim=1)
    )
    if places.kept is not None:
        stored = k.index_select(0, places.kept), v.index_select(0, places.kept)
    else:
        stored = k, v
    for cache, new, scale_H in zip((k_cache, v_cache), stored, (k_scale_H, v_scale_H), strict=True):
        # Finite, whatever the policy computed: a broken request must not poison the blocks it leaves behind.
        finite = torch.nan_to_num(new, 0.0, 0.0, 0.0)
        if cache.dtype == E4M3:
            finite = to_e4m3(finite.float() / scale_H.unsqueeze(1)).view(torch.uint8)
            cache = cache.view(torch.uint8)
        cache.view(-1, num_kv_heads, head_dim).index_copy_(0, places.slots, finite.to(cache.dtype))
    return q.contiguous()


class HeadShape(NamedTuple):
    """What the rotating kernels are compiled for; `block`: a head's half, with room."""

    heads: int
    kv_heads: int
    head_dim: int
    # Heads of a token that a program takes.
    together: int
    block: int


@triton.jit
def norm_weights(norms, column, inside, half: tl.constexpr, is_query):
    """Returns both halves of the query's or the key's norm for each head, in float32."""
    q_norm_ptr, k_norm_ptr = norms
    at = column[None, :]
    q_a = tl.load(q_norm_ptr + at, mask=inside, other=0.0).to(tl.float32)
    q_b = tl.load(q_norm_ptr + half + at, mask=inside, other=0.0).to(tl.float32)
    k_a = tl.load(k_norm_ptr + at, mask=inside, other=0.0).to(tl.float32)
    k_b = tl.load(k_norm_ptr + half + at, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query, q_a, k_a), tl.where(is_query, q_b, k_b)


@triton.jit
def inverse_rms(a, b, head_dim: tl.constexpr, epsilon):
    """Returns what normalises heads, of both halves `[heads, block]`."""
    return tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / head_dim + epsilon)[:, None]


@triton.jit
def _rope_kv_kernel(
    qkv_ptr,
    part_stride,
    places,
    norms,
    q_out_ptr,
    cache,
    epsilon,
    SHAPE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (token, some of its heads)."""
    launch_next(PDL)
    HEADS: tl.constexpr = SHAPE.heads
    KV_HEADS: tl.constexpr = SHAPE.kv_heads
    DIM: tl.constexpr = SHAPE.head_dim
    half: tl.constexpr = DIM // 2
    positions_ptr, slots_ptr, cos_ptr, sin_ptr = places
    k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr = cache
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * SHAPE.together + tl.arange(0, SHAPE.together)
    column = tl.arange(0, SHAPE.block)
    in_half = column < half
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    mask = (head < HEADS + 2 * KV_HEADS)[:, None] & in_half[None, :]
    in_heads = head[:, None] * DIM + column[None, :]
    offset = token * (HEADS + 2 * KV_HEADS) * DIM + in_heads
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * half + column, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + position * half + column, mask=in_half, other=0.0).to(tl.float32)[None, :]
    if norms[0] is not None:
        norm_a, norm_b = norm_weights(norms, column, in_half[None, :], half, is_query[:, None])
    if k_scale_ptr is not None:
        k_scale = tl.load(k_scale_ptr + head - HEADS, mask=is_key, other=1.0)[:, None]
        is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
        v_scale = tl.load(v_scale_ptr + head - HEADS - KV_HEADS, mask=is_value, other=1.0)[:, None]
    wait_previous(PDL)
    a = tl.load(qkv_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(qkv_ptr + offset + half, mask=mask, other=0.0).to(tl.float32)
    q_type = q_out_ptr.dtype.element_ty
    if PARTS > 1:
        for _ in tl.static_range(1, PARTS):
            offset += part_stride
            a += tl.load(qkv_ptr + offset, mask=mask, other=0.0)
            b += tl.load(qkv_ptr + offset + half, mask=mask, other=0.0)
        a, b = a.to(q_type).to(tl.float32), b.to(q_type).to(tl.float32)

    rotated_a, rotated_b = a, b
    if norms[0] is not None:
        scale = inverse_rms(a, b, DIM, epsilon)
        rotated_a = a * scale * norm_a
        rotated_b = b * scale * norm_b
    out_a = rotated_a * cos - rotated_b * sin
    out_b = rotated_b * cos + rotated_a * sin

    q_offset = token * HEADS * DIM + in_heads
    tl.store(q_out_ptr + q_offset, out_a.to(q_type), mask=mask & is_query[:, None])
    tl.store(q_out_ptr + q_offset + half, out_b.to(q_type), mask=mask & is_query[:, None])

    kv_type = k_cache_ptr.dtype.element_ty
    is_kept = (slot + head * 0) >= 0
    k_mask = mask & (is_key & is_kept)[:, None]
    k_offset = (slot * KV_HEADS + head[:, None] - HEADS) * DIM + column[None, :]
    if k_scale_ptr is not None:
        out_a, out_b = e4m3_of(out_a, k_scale), e4m3_of(out_b, k_scale)
        a, b = e4m3_of(a, v_scale), e4m3_of(b, v_scale)
    tl.store(k_cache_ptr + k_offset, out_a.to(kv_type), mask=k_mask)
    tl.store(k_cache_ptr + k_offset + half, out_b.to(kv_type), mask=k_mask)
    v_mask = mask & ((head >= HEADS + KV_HEADS) & is_kept)[:, None]
    v_offset = k_offset - KV_HEADS * DIM
    tl.store(v_cache_ptr + v_offset, a.to(kv_type), mask=v_mask)
    tl.store(v_cache_ptr + v_offset + half, b.to(kv_type), mask=v_mask)


def rope_and_write_kv_triton(
    qkv,
    positions,
    slot_mapping,
    cos_PC,
    sin_PC,
    k_cache,
    v_cache,
    num_heads,
    q_norm_weight=None,
    k_norm_weight=None,
    epsilon=1e-6,
    k_scale_H=None,
    v_scale_H=None,
    dtype=None,
):
    num_tokens, part_size = qkv.shape[-2], qkv[0].numel()
    num_kv_heads, head_dim = k_cache.shape[2:]
    q_out = torch.empty(num_tokens, num_heads, head_dim, dtype=dtype or qkv.dtype, device=qkv.device)
    block = next_power_of_2(head_dim // 2)
    _rope_kv_kernel[(num_tokens, cdiv(num_heads + 2 * num_kv_heads, HEADS_PER_PROGRAM))](
        qkv,
        part_size,
        (positions, slot_mapping, cos_PC, sin_PC),
        (q_norm_weight, k_norm_weight),
        q_out,
        (k_cache, v_cache, k_scale_H, v_scale_H),
        epsilon,
        SHAPE=HeadShape(num_heads, num_kv_heads, head_dim, HEADS_PER_PROGRAM, block),
        PARTS=1 if qkv.ndim == 2 else len(qkv),
        **launch_options(num_warps=4),
    )
    return q_out


@reference_of(rope_and_write_kv_triton)
def rope_and_write_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_PC: torch.Tensor,
    sin_PC: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    k_scale_H: torch.Tensor | None = None,
    v_scale_H: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns the rotated q `[T, Hq, D]` of packed `qkv [T, (Hq + 2 Hkv) D]`, in `dtype` (default: qkv's).

    Rotated k and plain v go to their slots in the caches. On the GPU qkv may come in parts.
    """
    places = TokenPlaces.of(positions, slot_mapping, cos_PC, sin_PC)
    norms = q_norm_weight, k_norm_weight, epsilon
    return rotate_and_store(qkv, places, k_cache, v_cache, num_heads, *norms, k_scale_H, v_scale_H, dtype)
