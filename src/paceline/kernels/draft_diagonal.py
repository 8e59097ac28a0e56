"""Attention of a draft's step to the keys of the draft's own steps, joined with that to the text before.

A query of step S sees, besides a prefix of the text, one key of each of the draft's steps 1 .. S
(drafting/unroll.py says why). With s_i its scores for them, and L and P the log-sum-exp and the result of
attention to the prefix:

    total = logaddexp(L, s_1, .., s_S)          w_i = exp(s_i - total)
    result = exp(L - total) P + sum of w_i v_i

Steps keep their keys by row; the one that row r sees of step i is that of row r - (S - i), counted in a
circle. Whole steps write rows of their own, so what the backward pass adds up it adds in a fixed order.
"""

from typing import NamedTuple

import torch

from paceline.kernels.operation import next_power_of_2, on_gpu_or_meta, reference_of
from paceline.kernels.training_launch import plain_options
from paceline.kernels.triton_support import tl, triton


def _seen(own_SRKD: torch.Tensor) -> torch.Tensor:
    """Returns what each row sees of every step, `[S, R, K, D]`."""
    last = len(own_SRKD) - 1
    return torch.stack([rows_RKD.roll(last - i, 0) for i, rows_RKD in enumerate(own_SRKD)])


class _Shape(NamedTuple):
    """What the kernels are compiled for; blocks are of queries of a key head, and of their columns."""

    steps: int
    kv_heads: int
    group: int
    head_dim: int
    block_g: int
    block_d: int


@triton.jit
def _own_rows(row, kv_head, i, num_rows, SHAPE: tl.constexpr):
    """Returns where the key begins that a row sees of step i, counted from 0."""
    seen = row - (SHAPE.steps - 1 - i)
    seen = tl.where(seen < 0, seen + num_rows, seen)
    return ((i * num_rows + seen) * SHAPE.kv_heads + kv_head) * SHAPE.head_dim


@triton.jit
def _own_queries(SHAPE: tl.constexpr):
    """Returns a program's row and key head, the columns, the heads of its queries, and where they lie."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    member = tl.arange(0, SHAPE.block_g)
    column = tl.arange(0, SHAPE.block_d)
    inside = column < SHAPE.head_dim
    is_head = member < SHAPE.group
    head = row * SHAPE.kv_heads * SHAPE.group + kv_head * SHAPE.group + member
    at = head[:, None] * SHAPE.head_dim + column[None, :]
    return row, kv_head, column, inside, head, is_head, at, is_head[:, None] & inside[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _join_kernel(tensors, num_rows, scale, SHAPE: tl.constexpr):
    """Programs (row, key head): all queries of a key head."""
    prefix_ptr, prefix_lse_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr = tensors
    row, kv_head, column, inside, head, is_head, at, mask = _own_queries(SHAPE)
    STEPS: tl.constexpr = SHAPE.steps
    q = tl.load(q_ptr + at, mask=mask, other=0.0).to(tl.float32)
    top = tl.load(prefix_lse_ptr + head, mask=is_head, other=0.0)
    highest = top
    for i in tl.static_range(STEPS):
        own = _own_rows(row, kv_head, i, num_rows, SHAPE)
        k = tl.load(k_ptr + own + column, mask=inside, other=0.0).to(tl.float32)
        highest = tl.maximum(highest, tl.sum(q * k[None, :], axis=1) * scale)
    total = tl.exp(top - highest)
    result = total[:, None] * tl.load(prefix_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(STEPS):
        own = _own_rows(row, kv_head, i, num_rows, SHAPE)
        k = tl.load(k_ptr + own + column, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + own + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.exp(tl.sum(q * k[None, :], axis=1) * scale - highest)
        total += weight
        result += weight[:, None] * v[None, :]
    tl.store(out_ptr + at, (result / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + head, highest + tl.log(total), mask=is_head)


@triton.jit(do_not_specialize=["num_rows"])
def _join_backward_kernel(tensors, num_rows, scale, SHAPE: tl.constexpr):
    """Programs (row, key head); of each step's rows a program alone reads and writes the one it sees."""
    d_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, d_q_ptr, d_k_ptr, d_v_ptr = tensors
    row, kv_head, column, inside, head, is_head, at, mask = _own_queries(SHAPE)
    STEPS: tl.constexpr = SHAPE.steps
    q = tl.load(q_ptr + at, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(d_ptr + at, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + head, mask=is_head, other=0.0)
    d_q = tl.load(d_q_ptr + at, mask=mask, other=0.0).to(tl.float32)
    whole = tl.sum(d * out, axis=1)
    for i in tl.static_range(STEPS):
        own = _own_rows(row, kv_head, i, num_rows, SHAPE)
        k = tl.load(k_ptr + own + column, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + own + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.exp(tl.sum(q * k[None, :], axis=1) * scale - lse)
        slope = weight * (tl.sum(d * v[None, :], axis=1) - whole) * scale
        d_q += slope[:, None] * k[None, :]
        d_k = tl.load(d_k_ptr + own + column, mask=inside, other=0.0)
        d_v = tl.load(d_v_ptr + own + column, mask=inside, other=0.0)
        # Rows past the group have zeros in q and d.
        d_k += tl.sum(slope[:, None] * q, axis=0)
        d_v += tl.sum(weight[:, None] * d, axis=0)
        tl.store(d_k_ptr + own + column, d_k, mask=inside)
        tl.store(d_v_ptr + own + column, d_v, mask=inside)
    tl.store(d_q_ptr + at, d_q.to(d_q_ptr.dtype.element_ty), mask=mask)


def _launch(kernel, q_RHD, own_SRKD, *tensors):
    rows, heads, head_dim = q_RHD.shape
    if not rows or q_RHD.is_meta:
        return
    steps, _, kv_heads, _ = own_SRKD.shape
    group = heads // kv_heads
    blocks = next_power_of_2(group), next_power_of_2(head_dim)
    shape = _Shape(steps, kv_heads, group, head_dim, *blocks)
    kernel[(rows, kv_heads)](tensors, rows, head_dim**-0.5, SHAPE=shape, **plain_options(num_warps=1))


def join_diagonal_triton(prefix_RHD, prefix_lse_RH, q_RHD, own_k_SRKD, own_v_SRKD):
    joined = torch.empty_like(q_RHD), torch.empty_like(prefix_lse_RH)
    tensors = prefix_RHD, prefix_lse_RH, q_RHD, own_k_SRKD, own_v_SRKD, *joined
    _launch(_join_kernel, q_RHD, own_k_SRKD, *tensors)
    return joined


def join_diagonal_backward_triton(*tensors):
    _, q_RHD, own_k_SRKD, *_ = tensors
    _launch(_join_backward_kernel, q_RHD, own_k_SRKD, *tensors)


@reference_of(join_diagonal_triton, on_gpu_or_meta)
def join_diagonal(
    prefix_RHD: torch.Tensor,
    prefix_lse_RH: torch.Tensor,
    q_RHD: torch.Tensor,
    own_k_SRKD: torch.Tensor,
    own_v_SRKD: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the result `[R, H, D]` and the log-sum-exp `[R, H]` of attention to prefix and own keys.

    At least one step has keys; a query without a prefix has the log-sum-exp -inf and any finite result for
    it. All inputs are contiguous.
    """
    groups = (own_k_SRKD.shape[2], -1)
    wide = prefix_lse_RH.dtype
    q_RKGD = q_RHD.to(wide).unflatten(1, groups)
    k_SRKD, v_SRKD = _seen(own_k_SRKD).to(wide), _seen(own_v_SRKD).to(wide)
    own_SRH = (q_RKGD * k_SRKD.unsqueeze(3)).sum(-1).flatten(2) * q_RHD.shape[-1] ** -0.5
    lse_RH = torch.logaddexp(prefix_lse_RH, own_SRH.logsumexp(0))
    weights_SRKG1 = (own_SRH - lse_RH).exp().unflatten(2, groups).unsqueeze(-1)
    own_RHD = (weights_SRKG1 * v_SRKD.unsqueeze(3)).sum(0).flatten(1, 2)
    share_RH1 = (prefix_lse_RH - lse_RH).exp().unsqueeze(-1)
    return (share_RH1 * prefix_RHD + own_RHD).to(q_RHD.dtype), lse_RH


@reference_of(join_diagonal_backward_triton, on_gpu_or_meta)
def join_diagonal_backward(
    d_RHD: torch.Tensor,
    q_RHD: torch.Tensor,
    own_k_SRKD: torch.Tensor,
    own_v_SRKD: torch.Tensor,
    out_RHD: torch.Tensor,
    lse_RH: torch.Tensor,
    d_q_RHD: torch.Tensor,
    d_own_k_SRKD: torch.Tensor,
    d_own_v_SRKD: torch.Tensor,
) -> None:
    """Adds the gradients by way of the own keys: to that of q, and in place to those of keys and values.

    The latter have the log-sum-exp's type. All are contiguous.
    """
    groups = (own_k_SRKD.shape[2], -1)
    scale = q_RHD.shape[-1] ** -0.5
    d, q, out = (x_RHD.to(lse_RH.dtype).unflatten(1, groups) for x_RHD in (d_RHD, q_RHD, out_RHD))
    lse_RKG, whole_RKG = lse_RH.unflatten(1, groups), (d * out).sum(-1)
    d_q_RKGD = torch.zeros_like(q)
    last = len(own_k_SRKD) - 1
    for i, (k_RKD, v_RKD) in enumerate(zip(own_k_SRKD, own_v_SRKD, strict=True)):
        k = k_RKD.to(lse_RH.dtype).roll(last - i, 0).unsqueeze(2)
        v = v_RKD.to(lse_RH.dtype).roll(last - i, 0).unsqueeze(2)
        weights_RKG = ((q * k).sum(-1) * scale - lse_RKG).exp()
        slopes_RKG1 = (weights_RKG * ((d * v).sum(-1) - whole_RKG) * scale).unsqueeze(-1)
        d_q_RKGD += slopes_RKG1 * k
        d_own_k_SRKD[i] += (slopes_RKG1 * q).sum(2).roll(i - last, 0)
        d_own_v_SRKD[i] += (weights_RKG.unsqueeze(-1) * d).sum(2).roll(i - last, 0)
    d_q_RHD += d_q_RKGD.flatten(1, 2).to(d_q_RHD.dtype)
