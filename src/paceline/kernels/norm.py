"""RMSNorm, alone or after adding a residual.

One program sees one row, so a row's bits depend on nothing else.

The input may be a product in parts, `[parts, M, K]` in float32 (fp8_linear.py); their sum in order is rounded
to the residual's type. The `quantised` variants return what an FP8 product takes: exactly the rows of the
plain variant, quantised.
"""

import functools

import torch
import torch.nn.functional as F

from paceline.kernels.fp8_format import QuantisedRows, quantise_groups
from paceline.kernels.fp8_quantise import quantise_rows_reference, store_groups
from paceline.kernels.operation import next_power_of_2, reference_of
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous


def rms_norm_reference(x: torch.Tensor, weight_K: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The reference of `rms_norm`; x may have any number of dimensions."""
    if x.dtype == weight_K.dtype and x.dtype in (torch.float32, torch.float64):
        # The same operations in fewer calls.
        return F.rms_norm(x, weight_K.shape, weight_K, epsilon)
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * scale * weight_K.to(wide.dtype)).to(x.dtype)


@triton.jit
def rms_norm_block(x, weight, epsilon, K: tl.constexpr):
    """Normalises the last axis of a block in float32; columns past K must hold zeros."""
    mean_square = tl.sum(x * x, axis=-1) / K
    return x * tl.expand_dims(tl.rsqrt(mean_square + epsilon), -1) * weight


@triton.jit(do_not_specialize=["num_rows", "padded_rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out,
    total_ptr,
    num_rows,
    padded_rows,
    epsilon,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row."""
    launch_next(PDL)
    out_ptr, values_ptr, scales_ptr = out
    column = tl.arange(0, BLOCK_K)
    row = tl.program_id(0).to(tl.int64)
    offset = row * K + column
    mask = column < K
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    wait_previous(PDL)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            x += tl.load(x_ptr + part * num_rows.to(tl.int64) * K + offset, mask=mask, other=0.0)
        x = x.to(total_ptr.dtype.element_ty).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        # Normalise what the next residual will be, as the reference does.
        x = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + offset, x, mask=mask)
        x = x.to(tl.float32)
    normed = rms_norm_block(x, weight, epsilon, K)
    if out_ptr is None:
        group = tl.arange(0, BLOCK_K // 128)
        grouped = tl.reshape(normed.to(weight_ptr.dtype.element_ty).to(tl.float32), (BLOCK_K // 128, 128))
        values, scales = quantise_groups(grouped)
        column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        store_groups(values, scales, values_ptr, scales_ptr, row, group, column, padded_rows, PADDED_K)
    else:
        tl.store(out_ptr + offset, normed.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm_triton(x_MK, residual_MK, weight_K, epsilon, quantise=False):
    """Returns the norm, plain or quantised, and the sum with the residual, if there is one."""
    num_rows, width = x_MK.shape[-2:]
    dtype, device = weight_K.dtype, x_MK.device
    if quantise:
        result = QuantisedRows.empty(num_rows, width, dtype, device)
        out = None, result.values_MK, result.scales_GM
    else:
        result = torch.empty(num_rows, width, dtype=dtype, device=device)
        out = result, None, None
    total_MK = torch.empty_like(residual_MK) if residual_MK is not None else None
    padded_rows, padded_width = result.values_MK.shape if quantise else result.shape
    block = max(128, next_power_of_2(width))
    _rms_norm_kernel[(num_rows,)](
        x_MK,
        residual_MK,
        weight_K,
        out,
        total_MK,
        num_rows,
        padded_rows,
        epsilon,
        K=width,
        BLOCK_K=block,
        PADDED_K=padded_width,
        PARTS=1 if x_MK.ndim == 2 else len(x_MK),
        **launch_options(num_warps=min(8, max(1, block // 512))),
    )
    return result, total_MK


def rms_norm(x_MK: torch.Tensor, weight_K: torch.Tensor, epsilon: float) -> torch.Tensor:
    if x_MK.is_cuda:
        return rms_norm_triton(x_MK, None, weight_K, epsilon)[0]
    return rms_norm_reference(x_MK, weight_K, epsilon)


@reference_of(rms_norm_triton)
def rms_norm_residual(
    x_MK: torch.Tensor, residual_MK: torch.Tensor, weight_K: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (norm(x + residual), x + residual); x may be in parts."""
    total_MK = x_MK + residual_MK
    return rms_norm_reference(total_MK, weight_K, epsilon), total_MK


def rms_norm_quantised(x_MK: torch.Tensor, weight_K: torch.Tensor, epsilon: float) -> QuantisedRows:
    """Returns norm(x), quantised for an FP8 product."""
    if x_MK.is_cuda:
        return rms_norm_triton(x_MK, None, weight_K, epsilon, quantise=True)[0]
    return quantise_rows_reference(rms_norm_reference(x_MK, weight_K, epsilon))


@reference_of(functools.partial(rms_norm_triton, quantise=True))
def rms_norm_residual_quantised(
    x_MK: torch.Tensor, residual_MK: torch.Tensor, weight_K: torch.Tensor, epsilon: float
) -> tuple[QuantisedRows, torch.Tensor]:
    """Returns (norm(x + residual) quantised for an FP8 product, x + residual)."""
    normed_MK, total_MK = rms_norm_residual.reference(x_MK, residual_MK, weight_K, epsilon)
    return quantise_rows_reference(normed_MK), total_MK
