"""silu(gate) * up of a packed `[M, 2F]` gate-up projection.

A kernel of its own: in the epilogue of the GEMM it would save a launch (1.2 us) but make a program stream two
weight tiles, and that was measured slower (56 us against 51 + 1.2 for the Qwen3-8B shape at M = 1).
"""

import torch
import torch.nn.functional as F

from paceline.kernels.fp8_format import GROUP, QuantisedRows, quantise_groups
from paceline.kernels.fp8_quantise import quantise_rows_reference, store_groups
from paceline.kernels.operation import cdiv
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous

# Columns that one program computes.
BLOCK = 1024


def silu_multiply_reference(gate_up_M2F: torch.Tensor) -> torch.Tensor:
    gate_MF, up_MF = gate_up_M2F.chunk(2, dim=-1)
    if gate_up_M2F.dtype in (torch.float32, torch.float64):
        return F.silu(gate_MF) * up_MF
    return (F.silu(gate_MF.float()) * up_MF.float()).to(gate_up_M2F.dtype)


@triton.jit
def silu_multiply_block(gate, up):
    """Returns silu(gate) * up of a block in float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_multiply_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_next(PDL)
    wait_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up_ptr + row * 2 * width + column, mask=mask).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + column, mask=mask).to(tl.float32)
    tl.store(
        out_ptr + row * width + column, silu_multiply_block(gate, up).to(out_ptr.dtype.element_ty), mask=mask
    )


def silu_multiply_triton(gate_up_M2F: torch.Tensor, out_MF: torch.Tensor | None = None) -> torch.Tensor:
    num_rows, width = gate_up_M2F.shape[0], gate_up_M2F.shape[1] // 2
    if out_MF is None:
        out_MF = torch.empty(num_rows, width, dtype=gate_up_M2F.dtype, device=gate_up_M2F.device)
    grid = (num_rows, cdiv(width, BLOCK))
    _silu_multiply_kernel[grid](gate_up_M2F, out_MF, width, BLOCK=BLOCK, **launch_options(num_warps=4))
    return out_MF


@triton.jit(do_not_specialize=["padded_rows"])
def _silu_multiply_quantised_kernel(
    gate_up_ptr, values_ptr, scales_ptr, padded_rows, width, PADDED_K, GROUPS: tl.constexpr, PDL: tl.constexpr
):
    """One program per row and GROUPS groups of 128 columns."""
    launch_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = column < width
    wait_previous(PDL)
    gate = tl.load(gate_up_ptr + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
    rounded = silu_multiply_block(gate, up).to(gate_up_ptr.dtype.element_ty).to(tl.float32)
    values, scales = quantise_groups(rounded)
    store_groups(values, scales, values_ptr, scales_ptr, row, group, column, padded_rows, PADDED_K)


def silu_multiply_quantised_triton(gate_up_M2F: torch.Tensor) -> QuantisedRows:
    num_rows, width = gate_up_M2F.shape[0], gate_up_M2F.shape[1] // 2
    out = QuantisedRows.empty(num_rows, width, gate_up_M2F.dtype, gate_up_M2F.device)
    padded_rows, padded_width = out.values_MK.shape
    _silu_multiply_quantised_kernel[(num_rows, cdiv(padded_width, BLOCK))](
        gate_up_M2F,
        out.values_MK,
        out.scales_GM,
        padded_rows,
        width,
        padded_width,
        GROUPS=BLOCK // GROUP,
        **launch_options(num_warps=4),
    )
    return out


def silu_multiply_quantised(gate_up_M2F: torch.Tensor) -> QuantisedRows:
    """Returns exactly the rows of `silu_multiply`, quantised for an FP8 product."""
    if gate_up_M2F.is_cuda:
        return silu_multiply_quantised_triton(gate_up_M2F)
    return quantise_rows_reference(silu_multiply_reference(gate_up_M2F))


def silu_multiply(gate_up_M2F: torch.Tensor, out_MF: torch.Tensor | None = None) -> torch.Tensor:
    """Returns silu(gate) * up, `[M, F]`; in `out_MF` where that is given."""
    if gate_up_M2F.is_cuda:
        return silu_multiply_triton(gate_up_M2F, out_MF)
    result_MF = silu_multiply_reference(gate_up_M2F)
    return result_MF if out_MF is None else out_MF.copy_(result_MF)
