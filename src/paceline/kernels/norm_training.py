"""RMSNorm for learning: with the residual it forks from, forward and backward.

    total = x + residual      normed = total * r * weight,  r = 1 / sqrt(mean(total^2) + epsilon)

With g = weight * d_normed and h = total * r, of K columns:

    d_total += r (g - h mean(g h))          d_weight = sum over rows of d_normed h

Forward is the rollout's own kernel (norm.py), so both sides round alike. The backward pass keeps `total`
alone and computes r again; each program leaves the sum of its rows' share of d_weight, and these are added in
a fixed order.
"""

import torch

from paceline.kernels.norm import rms_norm, rms_norm_residual
from paceline.kernels.operation import next_power_of_2, on_gpu_or_meta, reference_of
from paceline.kernels.training_launch import plain_options, reduction_programs
from paceline.kernels.triton_support import tl, triton


@triton.jit(do_not_specialize=["num_rows"])
def _norm_backward_kernel(
    given, weight_ptr, d_ptr, partial_ptr, num_rows, epsilon, K: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Each program takes every P-th row of P programs."""
    d_normed_ptr, d_total_ptr, total_ptr = given
    column = tl.arange(0, BLOCK_K)
    mask = column < K
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    d_weight = tl.zeros((BLOCK_K,), tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), num_rows, tl.num_programs(0)):
        offset = row * K + column
        total = tl.load(total_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        d_normed = tl.load(d_normed_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(total * total, axis=0) / K + epsilon)
        h = total * r
        g = weight * d_normed
        d = r * (g - h * (tl.sum(g * h, axis=0) / K))
        if d_total_ptr is not None:
            d += tl.load(d_total_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(d_ptr + offset, d.to(d_ptr.dtype.element_ty), mask=mask)
        if partial_ptr is not None:
            d_weight += d_normed * h
    if partial_ptr is not None:
        tl.store(partial_ptr + tl.program_id(0) * K + column, d_weight, mask=mask)


def rms_norm_backward_triton(d_normed_MK, d_total_MK, total_MK, weight_K, epsilon, needs_weight=True):
    num_rows, width = total_MK.shape
    d_MK = torch.empty_like(total_MK)
    programs = reduction_programs(num_rows, total_MK.device)
    partial_PK = None
    if needs_weight:
        partial_PK = torch.empty(programs, width, dtype=torch.float32, device=total_MK.device)
    if not total_MK.is_meta:
        block = next_power_of_2(width)
        _norm_backward_kernel[(programs,)](
            (d_normed_MK, d_total_MK, total_MK),
            weight_K,
            d_MK,
            partial_PK,
            num_rows,
            epsilon,
            K=width,
            BLOCK_K=block,
            **plain_options(num_warps=min(16, max(1, block // 512))),
        )
    return d_MK, partial_PK.sum(0).to(weight_K.dtype) if needs_weight else None


def fork_norm(
    x_MK: torch.Tensor, residual_MK: torch.Tensor | None, weight_K: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (norm(x + residual), x + residual); without a residual the second is x itself.

    Its kernel is the rollout's (norm.py).
    """
    if x_MK.is_meta:
        return torch.empty_like(x_MK), x_MK if residual_MK is None else torch.empty_like(x_MK)
    if residual_MK is None:
        return rms_norm(x_MK, weight_K, epsilon), x_MK
    return rms_norm_residual(x_MK, residual_MK, weight_K, epsilon)


@reference_of(rms_norm_backward_triton, on_gpu_or_meta)
def rms_norm_backward(
    d_normed_MK: torch.Tensor,
    d_total_MK: torch.Tensor | None,
    total_MK: torch.Tensor,
    weight_K: torch.Tensor,
    epsilon: float,
    needs_weight: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the gradients of `total` (that which reached it directly included) and of the weight."""
    wide = torch.promote_types(total_MK.dtype, torch.float32)
    total, d_normed, weight = total_MK.to(wide), d_normed_MK.to(wide), weight_K.to(wide)
    r = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    h = total * r
    g = weight * d_normed
    d_MK = r * (g - h * (g * h).mean(-1, keepdim=True))
    if d_total_MK is not None:
        d_MK = d_MK + d_total_MK.to(wide)
    return d_MK.to(total_MK.dtype), (d_normed * h).sum(0).to(weight_K.dtype)
