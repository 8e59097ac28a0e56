"""Between the QKV projection and attention, for learning: optional QK-norm and RoPE, forward and backward.

    qkv[t] = [ q heads | k heads | v heads ]      q and k: norm, rotation; v stays where it is

Forward rounds as the rollout's kernel does (rope_kv.py): once, after the rotation. Backward, with halves
(a, b) of a head:

    rotation    d_a = d_a' cos + d_b' sin        d_b = d_b' cos - d_a' sin
    norm        as in norm_training.py, over the head's columns

The backward pass needs qkv only where there is a norm; its result is the gradient of the whole of qkv, the
values' included. Each program leaves its tokens' share of the norms' gradients, added in a fixed order.
"""

import torch

from paceline.kernels.norm import rms_norm_reference
from paceline.kernels.norm_training import rms_norm_backward
from paceline.kernels.operation import next_power_of_2, on_gpu_or_meta, reference_of
from paceline.kernels.rope_kv import HeadShape, inverse_rms, norm_weights, rope_reference
from paceline.kernels.training_launch import plain_options, reduction_programs
from paceline.kernels.triton_support import tl, triton

# Heads that one program rotates at most.
MAX_HEADS = 8


@triton.jit
def _rotate_kernel(qkv_ptr, rope_ptr, norms, q_ptr, k_ptr, epsilon, SHAPE: tl.constexpr):
    """Programs (token, some of its query or of its key heads)."""
    HEADS: tl.constexpr = SHAPE.heads
    KV_HEADS: tl.constexpr = SHAPE.kv_heads
    DIM: tl.constexpr = SHAPE.head_dim
    half: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * SHAPE.together + tl.arange(0, SHAPE.together)
    is_query = (head < HEADS)[:, None]
    column = tl.arange(0, SHAPE.block)
    inside = (column < half)[None, :]
    mask = inside & (head[:, None] >= 0)
    in_heads = head[:, None] * DIM + column[None, :]
    offset = token * (HEADS + 2 * KV_HEADS) * DIM + in_heads
    cos = tl.load(rope_ptr + token * DIM + column[None, :], mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(rope_ptr + token * DIM + half + column[None, :], mask=inside, other=0.0).to(tl.float32)
    a = tl.load(qkv_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(qkv_ptr + offset + half, mask=mask, other=0.0).to(tl.float32)
    if norms[0] is not None:
        norm_a, norm_b = norm_weights(norms, column, inside, half, is_query)
        r = inverse_rms(a, b, DIM, epsilon)
        a = a * r * norm_a
        b = b * r * norm_b
    out_a = (a * cos - b * sin).to(q_ptr.dtype.element_ty)
    out_b = (b * cos + a * sin).to(q_ptr.dtype.element_ty)
    q_offset = token * HEADS * DIM + in_heads
    tl.store(q_ptr + q_offset, out_a, mask=mask & is_query)
    tl.store(q_ptr + q_offset + half, out_b, mask=mask & is_query)
    k_offset = token * KV_HEADS * DIM + (head[:, None] - HEADS) * DIM + column[None, :]
    tl.store(k_ptr + k_offset, out_a, mask=mask & (head[:, None] >= HEADS))
    tl.store(k_ptr + k_offset + half, out_b, mask=mask & (head[:, None] >= HEADS))


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_backward_kernel(
    d_qkv_parts, qkv_ptr, rope_ptr, norms, d_qkv_ptr, partial_ptr, num_tokens, epsilon, SHAPE: tl.constexpr
):
    """Programs (every P-th token, some of its query, key or value heads)."""
    HEADS: tl.constexpr = SHAPE.heads
    KV_HEADS: tl.constexpr = SHAPE.kv_heads
    DIM: tl.constexpr = SHAPE.head_dim
    half: tl.constexpr = DIM // 2
    d_q_ptr, d_k_ptr, d_v_ptr = d_qkv_parts
    group = tl.program_id(1)
    head = group * SHAPE.together + tl.arange(0, SHAPE.together)
    is_query = (head < HEADS)[:, None]
    is_value = (head >= HEADS + KV_HEADS)[:, None]
    column = tl.arange(0, SHAPE.block)
    inside = (column < half)[None, :]
    mask = inside & (head[:, None] >= 0)
    q_mask = mask & is_query
    k_mask = mask & (head >= HEADS)[:, None] & (head < HEADS + KV_HEADS)[:, None]
    v_mask = mask & is_value
    in_heads = head[:, None] * DIM + column[None, :]
    if norms[0] is not None:
        norm_a, norm_b = norm_weights(norms, column, inside, half, is_query)
        d_norm_a = tl.zeros_like(norm_a)
        d_norm_b = tl.zeros_like(norm_b)
    for token in range(tl.program_id(0).to(tl.int64), num_tokens, tl.num_programs(0)):
        q_at = d_q_ptr + token * HEADS * DIM + in_heads
        k_at = d_k_ptr + token * KV_HEADS * DIM + in_heads - HEADS * DIM
        v_at = d_v_ptr + token * KV_HEADS * DIM + in_heads - (HEADS + KV_HEADS) * DIM
        out_a = tl.load(q_at, mask=q_mask, other=0.0).to(tl.float32)
        out_b = tl.load(q_at + half, mask=q_mask, other=0.0).to(tl.float32)
        out_a += tl.load(k_at, mask=k_mask, other=0.0).to(tl.float32)
        out_b += tl.load(k_at + half, mask=k_mask, other=0.0).to(tl.float32)
        cos = tl.load(rope_ptr + token * DIM + column[None, :], mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(rope_ptr + token * DIM + half + column[None, :], mask=inside, other=0.0)
        d_a = out_a * cos + out_b * sin
        d_b = out_b * cos - out_a * sin
        offset = token * (HEADS + 2 * KV_HEADS) * DIM + in_heads
        if norms[0] is not None:
            a = tl.load(qkv_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(qkv_ptr + offset + half, mask=mask, other=0.0).to(tl.float32)
            r = inverse_rms(a, b, DIM, epsilon)
            a *= r
            b *= r
            d_norm_a += d_a * a
            d_norm_b += d_b * b
            g_a = d_a * norm_a
            g_b = d_b * norm_b
            mean = ((tl.sum(g_a * a, axis=1) + tl.sum(g_b * b, axis=1)) / DIM)[:, None]
            d_a = r * (g_a - a * mean)
            d_b = r * (g_b - b * mean)
        d_a += tl.load(v_at, mask=v_mask, other=0.0).to(tl.float32)
        d_b += tl.load(v_at + half, mask=v_mask, other=0.0).to(tl.float32)
        tl.store(d_qkv_ptr + offset, d_a.to(d_qkv_ptr.dtype.element_ty), mask=mask)
        tl.store(d_qkv_ptr + offset + half, d_b.to(d_qkv_ptr.dtype.element_ty), mask=mask)
    if norms[0] is not None:
        partial = partial_ptr + (tl.program_id(0) * tl.num_programs(1) + group) * DIM + column
        tl.store(partial, tl.sum(d_norm_a, axis=0), mask=column < half)
        tl.store(partial + half, tl.sum(d_norm_b, axis=0), mask=column < half)


def heads_together(num_heads: int, num_kv_heads: int) -> int:
    """Returns how many heads a program takes: a power of 2 that divides both numbers."""
    heads = 1
    while heads < MAX_HEADS and num_heads % (2 * heads) == 0 and num_kv_heads % (2 * heads) == 0:
        heads *= 2
    return heads


def _shape(num_heads: int, num_kv_heads: int, head_dim: int) -> HeadShape:
    together = heads_together(num_heads, num_kv_heads)
    return HeadShape(num_heads, num_kv_heads, head_dim, together, next_power_of_2(head_dim // 2))


def rotate_qk_triton(qkv_TN, rope_T2C, num_heads, num_kv_heads, q_norm_D, k_norm_D, epsilon):
    num_tokens, width = qkv_TN.shape
    shape = _shape(num_heads, num_kv_heads, width // (num_heads + 2 * num_kv_heads))
    q_THD = qkv_TN.new_empty(num_tokens, num_heads, shape.head_dim)
    k_THD = qkv_TN.new_empty(num_tokens, num_kv_heads, shape.head_dim)
    if not qkv_TN.is_meta:
        norms = q_norm_D, k_norm_D
        _rotate_kernel[(num_tokens, (num_heads + num_kv_heads) // shape.together)](
            qkv_TN, rope_T2C, norms, q_THD, k_THD, epsilon, SHAPE=shape, **plain_options(num_warps=2)
        )
    return q_THD, k_THD


def rotate_qk_backward_triton(d_q_THD, d_k_THD, d_v_THD, qkv_TN, rope_T2C, q_norm_D, k_norm_D, epsilon):
    num_tokens, num_heads, head_dim = d_q_THD.shape
    num_kv_heads = d_k_THD.shape[1]
    shape = _shape(num_heads, num_kv_heads, head_dim)
    groups = (num_heads + 2 * num_kv_heads) // shape.together
    d_qkv_TN = d_q_THD.new_empty(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    programs = reduction_programs(num_tokens, d_q_THD.device)
    partial_PGD = None
    if q_norm_D is not None:
        partial_PGD = torch.empty(programs, groups, head_dim, dtype=torch.float32, device=d_q_THD.device)
    if not d_q_THD.is_meta:
        _rotate_backward_kernel[(programs, groups)](
            (d_q_THD, d_k_THD, d_v_THD),
            qkv_TN,
            rope_T2C,
            (q_norm_D, k_norm_D),
            d_qkv_TN,
            partial_PGD,
            num_tokens,
            epsilon,
            SHAPE=shape,
            **plain_options(num_warps=2),
        )
    if partial_PGD is None:
        return d_qkv_TN, None, None
    queries = num_heads // shape.together
    keys = num_kv_heads // shape.together
    d_q_norm_D = partial_PGD[:, :queries].sum((0, 1)).to(q_norm_D.dtype)
    d_k_norm_D = partial_PGD[:, queries : queries + keys].sum((0, 1)).to(k_norm_D.dtype)
    return d_qkv_TN, d_q_norm_D, d_k_norm_D


@reference_of(rotate_qk_triton, on_gpu_or_meta)
def rotate_qk(
    qkv_TN: torch.Tensor,
    rope_T2C: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q `[T, H, D]` and k `[T, Hkv, D]` of packed `qkv`, normed and rotated; rope is cos and sin."""
    qkv_THD = qkv_TN.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
    wide = torch.promote_types(qkv_TN.dtype, torch.float32)
    rotated = []
    for x_THD, norm_D in (
        (qkv_THD[:, :num_heads], q_norm_D),
        (qkv_THD[:, num_heads : num_heads + num_kv_heads], k_norm_D),
    ):
        x_THD = x_THD.to(wide)
        x_THD = x_THD if norm_D is None else rms_norm_reference(x_THD, norm_D, epsilon)
        rotated.append(rope_reference(x_THD, rope_T2C[:, 0], rope_T2C[:, 1]).to(qkv_TN.dtype))
    return rotated[0], rotated[1]


@reference_of(rotate_qk_backward_triton, on_gpu_or_meta)
def rotate_qk_backward(
    d_q_THD: torch.Tensor,
    d_k_THD: torch.Tensor,
    d_v_THD: torch.Tensor,
    qkv_TN: torch.Tensor | None,
    rope_T2C: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Returns the gradients of qkv, in q's type, and of both norms, where there are any.

    All inputs are contiguous; those of k and v may be wider.
    """
    wide = torch.promote_types(d_q_THD.dtype, torch.float32)
    heads, head_dim = d_q_THD.shape[1:]
    kv_heads = d_k_THD.shape[1]
    gradients = []
    weights: list[torch.Tensor | None] = []
    for d_THD, norm_D, first, count in ((d_q_THD, q_norm_D, 0, heads), (d_k_THD, k_norm_D, heads, kv_heads)):
        # The inverse of a rotation is the rotation by the opposite angle.
        d_THD = rope_reference(d_THD.to(wide), rope_T2C[:, 0], -rope_T2C[:, 1])
        d_norm_D = None
        if norm_D is not None:
            x_THD = qkv_TN.unflatten(1, (-1, head_dim))[:, first : first + count].to(wide)
            flat, d_norm_D = rms_norm_backward.reference(
                d_THD.reshape(-1, head_dim), None, x_THD.reshape(-1, head_dim), norm_D, epsilon
            )
            d_THD = flat.view_as(d_THD)
        gradients.append(d_THD.to(d_q_THD.dtype))
        weights.append(d_norm_D)
    gradients.append(d_v_THD.to(d_q_THD.dtype))
    return torch.cat(gradients, 1).flatten(1), weights[0], weights[1]
