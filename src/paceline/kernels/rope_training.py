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
from paceline.kernels.rope_kv import rope_reference
from paceline.kernels.training_launch import plain_options, reduction_programs
from paceline.kernels.triton_support import tl, triton

# Heads that one program rotates at most.
MAX_HEADS = 8


@triton.jit
def _rotate_kernel(
    qkv_ptr,
    rope_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    k_ptr,
    epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """Programs (token, HEADS of its query or of its key heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_query = (head < NUM_HEADS)[:, None]
    column = tl.arange(0, HALF)
    half: tl.constexpr = HEAD_DIM // 2
    inside = (column < half)[None, :]
    mask = inside & (head[:, None] >= 0)
    offset = token * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM + head[:, None] * HEAD_DIM + column[None, :]
    cos = tl.load(rope_ptr + token * HEAD_DIM + column[None, :], mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(rope_ptr + token * HEAD_DIM + half + column[None, :], mask=inside, other=0.0).to(tl.float32)
    a = tl.load(qkv_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(qkv_ptr + offset + half, mask=mask, other=0.0).to(tl.float32)
    if QK_NORM:
        norm_a, norm_b = _norm_weights(q_norm_ptr, k_norm_ptr, column, inside, half, is_query)
        r = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM + epsilon)[:, None]
        a = a * r * norm_a
        b = b * r * norm_b
    out_a = (a * cos - b * sin).to(q_ptr.dtype.element_ty)
    out_b = (b * cos + a * sin).to(q_ptr.dtype.element_ty)
    q_offset = token * NUM_HEADS * HEAD_DIM + head[:, None] * HEAD_DIM + column[None, :]
    tl.store(q_ptr + q_offset, out_a, mask=mask & is_query)
    tl.store(q_ptr + q_offset + half, out_b, mask=mask & is_query)
    k_offset = token * NUM_KV_HEADS * HEAD_DIM + (head[:, None] - NUM_HEADS) * HEAD_DIM + column[None, :]
    tl.store(k_ptr + k_offset, out_a, mask=mask & (head[:, None] >= NUM_HEADS))
    tl.store(k_ptr + k_offset + half, out_b, mask=mask & (head[:, None] >= NUM_HEADS))


@triton.jit
def _norm_weights(q_norm_ptr, k_norm_ptr, column, inside, half: tl.constexpr, is_query):
    """Returns both halves of the query's or the key's norm for each head, in float32."""
    at = column[None, :]
    q_a = tl.load(q_norm_ptr + at, mask=inside, other=0.0).to(tl.float32)
    q_b = tl.load(q_norm_ptr + half + at, mask=inside, other=0.0).to(tl.float32)
    k_a = tl.load(k_norm_ptr + at, mask=inside, other=0.0).to(tl.float32)
    k_b = tl.load(k_norm_ptr + half + at, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query, q_a, k_a), tl.where(is_query, q_b, k_b)


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_backward_kernel(
    d_q_ptr,
    d_k_ptr,
    d_v_ptr,
    qkv_ptr,
    rope_ptr,
    q_norm_ptr,
    k_norm_ptr,
    d_qkv_ptr,
    partial_ptr,
    num_tokens,
    epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """Programs (every P-th token, HEADS of its query, key or value heads)."""
    group = tl.program_id(1)
    head = group * HEADS + tl.arange(0, HEADS)
    is_query = (head < NUM_HEADS)[:, None]
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    column = tl.arange(0, HALF)
    half: tl.constexpr = HEAD_DIM // 2
    inside = (column < half)[None, :]
    mask = inside & (head[:, None] >= 0)
    q_mask = mask & is_query
    k_mask = mask & (head >= NUM_HEADS)[:, None] & (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
    v_mask = mask & is_value
    in_heads = head[:, None] * HEAD_DIM + column[None, :]
    if QK_NORM:
        norm_a, norm_b = _norm_weights(q_norm_ptr, k_norm_ptr, column, inside, half, is_query)
        d_norm_a = tl.zeros((HEADS, HALF), tl.float32)
        d_norm_b = tl.zeros((HEADS, HALF), tl.float32)
    for token in range(tl.program_id(0).to(tl.int64), num_tokens, tl.num_programs(0)):
        q_at = d_q_ptr + token * NUM_HEADS * HEAD_DIM + in_heads
        k_at = d_k_ptr + token * NUM_KV_HEADS * HEAD_DIM + in_heads - NUM_HEADS * HEAD_DIM
        v_at = d_v_ptr + token * NUM_KV_HEADS * HEAD_DIM + in_heads - (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM
        out_a = tl.load(q_at, mask=q_mask, other=0.0).to(tl.float32)
        out_b = tl.load(q_at + half, mask=q_mask, other=0.0).to(tl.float32)
        out_a += tl.load(k_at, mask=k_mask, other=0.0).to(tl.float32)
        out_b += tl.load(k_at + half, mask=k_mask, other=0.0).to(tl.float32)
        cos = tl.load(rope_ptr + token * HEAD_DIM + column[None, :], mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(rope_ptr + token * HEAD_DIM + half + column[None, :], mask=inside, other=0.0)
        d_a = out_a * cos + out_b * sin
        d_b = out_b * cos - out_a * sin
        offset = token * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM + in_heads
        if QK_NORM:
            a = tl.load(qkv_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(qkv_ptr + offset + half, mask=mask, other=0.0).to(tl.float32)
            r = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM + epsilon)[:, None]
            a *= r
            b *= r
            d_norm_a += d_a * a
            d_norm_b += d_b * b
            g_a = d_a * norm_a
            g_b = d_b * norm_b
            mean = ((tl.sum(g_a * a, axis=1) + tl.sum(g_b * b, axis=1)) / HEAD_DIM)[:, None]
            d_a = r * (g_a - a * mean)
            d_b = r * (g_b - b * mean)
        d_a += tl.load(v_at, mask=v_mask, other=0.0).to(tl.float32)
        d_b += tl.load(v_at + half, mask=v_mask, other=0.0).to(tl.float32)
        tl.store(d_qkv_ptr + offset, d_a.to(d_qkv_ptr.dtype.element_ty), mask=mask)
        tl.store(d_qkv_ptr + offset + half, d_b.to(d_qkv_ptr.dtype.element_ty), mask=mask)
    if QK_NORM:
        partial = partial_ptr + (tl.program_id(0) * tl.num_programs(1) + group) * HEAD_DIM + column
        tl.store(partial, tl.sum(d_norm_a, axis=0), mask=column < half)
        tl.store(partial + half, tl.sum(d_norm_b, axis=0), mask=column < half)


def heads_together(num_heads: int, num_kv_heads: int) -> int:
    """Returns how many heads a program takes: a power of 2 that divides both numbers."""
    heads = 1
    while heads < MAX_HEADS and num_heads % (2 * heads) == 0 and num_kv_heads % (2 * heads) == 0:
        heads *= 2
    return heads


def rotate_qk_triton(qkv_TN, rope_T2C, num_heads, num_kv_heads, q_norm_D, k_norm_D, epsilon):
    num_tokens, width = qkv_TN.shape
    head_dim = width // (num_heads + 2 * num_kv_heads)
    q_THD = qkv_TN.new_empty(num_tokens, num_heads, head_dim)
    k_THD = qkv_TN.new_empty(num_tokens, num_kv_heads, head_dim)
    if not qkv_TN.is_meta:
        heads = heads_together(num_heads, num_kv_heads)
        _rotate_kernel[(num_tokens, (num_heads + num_kv_heads) // heads)](
            qkv_TN,
            rope_T2C,
            q_norm_D,
            k_norm_D,
            q_THD,
            k_THD,
            epsilon,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HEADS=heads,
            HALF=next_power_of_2(head_dim // 2),
            QK_NORM=q_norm_D is not None,
            **plain_options(num_warps=2),
        )
    return q_THD, k_THD


def rotate_qk_backward_triton(d_q_THD, d_k_THD, d_v_THD, qkv_TN, rope_T2C, q_norm_D, k_norm_D, epsilon):
    num_tokens, num_heads, head_dim = d_q_THD.shape
    num_kv_heads = d_k_THD.shape[1]
    heads = heads_together(num_heads, num_kv_heads)
    groups = (num_heads + 2 * num_kv_heads) // heads
    d_qkv_TN = d_q_THD.new_empty(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    programs = reduction_programs(num_tokens, d_q_THD.device)
    has_norm = q_norm_D is not None
    partial_PGD = (
        torch.empty(programs, groups, head_dim, dtype=torch.float32, device=d_q_THD.device)
        if has_norm
        else None
    )
    if not d_q_THD.is_meta:
        _rotate_backward_kernel[(programs, groups)](
            d_q_THD,
            d_k_THD,
            d_v_THD,
            qkv_TN,
            rope_T2C,
            q_norm_D,
            k_norm_D,
            d_qkv_TN,
            partial_PGD,
            num_tokens,
            epsilon,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HEADS=heads,
            HALF=next_power_of_2(head_dim // 2),
            QK_NORM=has_norm,
            **plain_options(num_warps=2),
        )
    if not has_norm:
        return d_qkv_TN, None, None
    queries = num_heads // heads
    keys = num_kv_heads // heads
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
    for d_THD, norm_D, first, count in (
        (d_q_THD, q_norm_D, 0, heads),
        (d_k_THD, k_norm_D, heads, kv_heads),
    ):
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
