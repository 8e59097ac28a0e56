"""Attention of a draft's step to the keys of the draft's own steps, joined with that to the text before.

A query of step S sees, besides a prefix of the text, one key of each of the draft's steps 1 .. S
(drafting/unroll.py says why). With s_i its scores for them, and L and P the log-sum-exp and the result of
attention to the prefix:

    total = logaddexp(L, s_1, .., s_S)          w_i = exp(s_i - total)
    result = exp(L - total) P + sum of w_i v_i

Steps keep their keys by row; the one that row r sees of step i is that of row r - (S - i), counted in a
circle. Whole steps write rows of their own, so what the backward pass adds up it adds in a fixed order.
"""

import torch

from paceline.kernels.operation import next_power_of_2, on_gpu_or_meta, reference_of
from paceline.kernels.training_launch import plain_options
from paceline.kernels.triton_support import tl, triton


def _seen(own_SRKD: torch.Tensor) -> torch.Tensor:
    """Returns what each row sees of every step, `[S, R, K, D]`."""
    last = len(own_SRKD) - 1
    return torch.stack([rows_RKD.roll(last - i, 0) for i, rows_RKD in enumerate(own_SRKD)])


@triton.jit
def _own_rows(row, kv_head, i, num_rows, S: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Returns where the key begins that a row sees of step i, counted from 0."""
    seen = row - (S - 1 - i)
    seen = tl.where(seen < 0, seen + num_rows, seen)
    return ((i * num_rows + seen) * KV_HEADS + kv_head) * HEAD_DIM


@triton.jit
def _own_queries(
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Returns a program's row and key head, the columns, the heads of its queries, and where they lie."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    member = tl.arange(0, BLOCK_G)
    column = tl.arange(0, BLOCK_D)
    inside = column < HEAD_DIM
    is_head = member < GROUP
    head = row * KV_HEADS * GROUP + kv_head * GROUP + member
    at = head[:, None] * HEAD_DIM + column[None, :]
    return row, kv_head, column, inside, head, is_head, at, is_head[:, None] & inside[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _join_kernel(
    prefix_ptr,
    prefix_lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    scale,
    S: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Programs (row, key head): all queries of a key head."""
    row, kv_head, column, inside, head, is_head, at, mask = _own_queries(
        KV_HEADS, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D
    )
    q = tl.load(q_ptr + at, mask=mask, other=0.0).to(tl.float32)
    top = tl.load(prefix_lse_ptr + head, mask=is_head, other=0.0)
    highest = top
    for i in tl.static_range(S):
        own = _own_rows(row, kv_head, i, num_rows, S, KV_HEADS, HEAD_DIM)
        k = tl.load(k_ptr + own + column, mask=inside, other=0.0).to(tl.float32)
        highest = tl.maximum(highest, tl.sum(q * k[None, :], axis=1) * scale)
    total = tl.exp(top - highest)
    result = total[:, None] * tl.load(prefix_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(S):
        own = _own_rows(row, kv_head, i, num_rows, S, KV_HEADS, HEAD_DIM)
        k = tl.load(k_ptr + own + column, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + own + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.exp(tl.sum(q * k[None, :], axis=1) * scale - highest)
        total += weight
        result += weight[:, None] * v[None, :]
    tl.store(out_ptr + at, (result / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + head, highest + tl.log(total), mask=is_head)


@triton.jit(do_not_specialize=["num_rows"])
def _join_backward_kernel(
    d_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    d_q_ptr,
    d_k_ptr,
    d_v_ptr,
    num_rows,
    scale,
    S: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Programs (row, key head); of each step's rows a program alone reads and writes the one it sees."""
    row, kv_head, column, inside, head, is_head, at, mask = _own_queries(
        KV_HEADS, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D
    )
    q = tl.load(q_ptr + at, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(d_ptr + at, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + head, mask=is_head, other=0.0)
    d_q = tl.load(d_q_ptr + at, mask=mask, other=0.0).to(tl.float32)
    whole = tl.sum(d * out, axis=1)
    for i in tl.static_range(S):
        own = _own_rows(row, kv_head, i, num_rows, S, KV_HEADS, HEAD_DIM)
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


def _shape(q_RHD: torch.Tensor, own_SRKD: torch.Tensor) -> dict:
    kv_heads, head_dim = own_SRKD.shape[2:]
    group = q_RHD.shape[1] // kv_heads
    return dict(
        S=len(own_SRKD),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_G=next_power_of_2(group),
        BLOCK_D=next_power_of_2(head_dim),
        **plain_options(num_warps=1),
    )


def join_diagonal_triton(prefix_RHD, prefix_lse_RH, q_RHD, own_k_SRKD, own_v_SRKD):
    out_RHD, lse_RH = torch.empty_like(q_RHD), torch.empty_like(prefix_lse_RH)
    rows, _, head_dim = q_RHD.shape
    if rows and not q_RHD.is_meta:
        _join_kernel[(rows, own_k_SRKD.shape[2])](
            prefix_RHD,
            prefix_lse_RH,
            q_RHD,
            own_k_SRKD,
            own_v_SRKD,
            out_RHD,
            lse_RH,
            rows,
            head_dim**-0.5,
            **_shape(q_RHD, own_k_SRKD),
        )
    return out_RHD, lse_RH


def join_diagonal_backward_triton(
    d_RHD, q_RHD, own_k_SRKD, own_v_SRKD, out_RHD, lse_RH, d_q_RHD, d_own_k_SRKD, d_own_v_SRKD
):
    rows, _, head_dim = q_RHD.shape
    if rows and not q_RHD.is_meta:
        _join_backward_kernel[(rows, own_k_SRKD.shape[2])](
            d_RHD,
            q_RHD,
            own_k_SRKD,
            own_v_SRKD,
            out_RHD,
            lse_RH,
            d_q_RHD,
            d_own_k_SRKD,
            d_own_v_SRKD,
            rows,
            head_dim**-0.5,
            **_shape(q_RHD, own_k_SRKD),
        )


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
