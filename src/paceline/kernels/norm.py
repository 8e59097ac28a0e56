"""RMSNorm, alone or after adding a residual. One program sees one row, so a row's bits depend on nothing else."""

import torch

from paceline.kernels.triton_support import launch_next, launch_options, next_power_of_2, tl, triton, wait_previous


def rms_norm_reference(x: torch.Tensor, weight_K: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * scale * weight_K.to(wide.dtype)).to(x.dtype)


def rms_norm_residual_reference(
    x_MK: torch.Tensor, residual_MK: torch.Tensor, weight_K: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total_MK = x_MK + residual_MK
    return rms_norm_reference(total_MK, weight_K, epsilon), total_MK


@triton.jit
def rms_norm_block(x, weight, epsilon, K: tl.constexpr):
    """Normalise the last axis of a block in float32; columns past K must hold zeros."""
    mean_square = tl.sum(x * x, axis=-1) / K
    return x * tl.expand_dims(tl.rsqrt(mean_square + epsilon), -1) * weight


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, epsilon,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ADD_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    column = tl.arange(0, BLOCK_K)
    offset = tl.program_id(0).to(tl.int64) * K + column
    mask = column < K
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    wait_previous(PDL)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if ADD_RESIDUAL:
        x += tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        x = x.to(total_ptr.dtype.element_ty)  # normalise what the next residual will be, as the reference does
        tl.store(total_ptr + offset, x, mask=mask)
        x = x.to(tl.float32)
    normed = rms_norm_block(x, weight, epsilon, K)
    tl.store(out_ptr + offset, normed.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm_triton(
    x_MK: torch.Tensor, residual_MK: torch.Tensor | None, weight_K: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    num_rows, width = x_MK.shape
    out_MK = torch.empty_like(x_MK)
    total_MK = torch.empty_like(x_MK) if residual_MK is not None else None
    block = next_power_of_2(width)
    _rms_norm_kernel[(num_rows,)](
        x_MK, residual_MK, weight_K, out_MK, total_MK, epsilon, K=width, BLOCK_K=block, ADD_RESIDUAL=residual_MK is not None,
        **launch_options(num_warps=min(8, max(1, block // 512))),
    )  # fmt: skip
    return out_MK, total_MK


def rms_norm(x_MK: torch.Tensor, weight_K: torch.Tensor, epsilon: float) -> torch.Tensor:
    if x_MK.is_cuda:
        return rms_norm_triton(x_MK, None, weight_K, epsilon)[0]
    return rms_norm_reference(x_MK, weight_K, epsilon)


def rms_norm_residual(x_MK: torch.Tensor, residual_MK: torch.Tensor, weight_K: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual)."""
    if x_MK.is_cuda:
        return rms_norm_triton(x_MK, residual_MK, weight_K, epsilon)
    return rms_norm_residual_reference(x_MK, residual_MK, weight_K, epsilon)
