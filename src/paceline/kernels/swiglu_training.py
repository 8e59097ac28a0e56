"""The gradient of silu(gate) * up, for learning; forward is the rollout's own kernel (swiglu.py).

s = 1 / (1 + exp(-gate))      d_up = d gate s      d_gate = d up s (1 + gate (1 - s))
"""

import torch

from paceline.kernels.operation import cdiv
from paceline.kernels.swiglu import BLOCK, silu_multiply
from paceline.kernels.training_launch import plain_options
from paceline.kernels.triton_support import tl, triton


def silu_multiply_backward_reference(d_MF: torch.Tensor, gate_up_M2F: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(d_MF.dtype, torch.float32)
    d = d_MF.to(wide)
    gate, up = gate_up_M2F.to(wide).chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    return torch.cat((d * up * s * (1 + gate * (1 - s)), d * gate * s), -1).to(gate_up_M2F.dtype)


@triton.jit
def _silu_multiply_backward_kernel(d_ptr, gate_up_ptr, d_gate_up_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    at = row * 2 * width + column
    d = tl.load(d_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + width, mask=mask, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    d_gate = d * up * s * (1.0 + gate * (1.0 - s))
    d_up = d * gate * s
    tl.store(d_gate_up_ptr + at, d_gate.to(d_gate_up_ptr.dtype.element_ty), mask=mask)
    tl.store(d_gate_up_ptr + at + width, d_up.to(d_gate_up_ptr.dtype.element_ty), mask=mask)


def silu_multiply_backward_triton(
    d_MF: torch.Tensor, gate_up_M2F: torch.Tensor, in_place: bool = False
) -> torch.Tensor:
    num_rows, width = d_MF.shape
    # A program reads all that it writes over.
    d_gate_up_M2F = gate_up_M2F if in_place else torch.empty_like(gate_up_M2F)
    if num_rows and not d_MF.is_meta:
        _silu_multiply_backward_kernel[(num_rows, cdiv(width, BLOCK))](
            d_MF, gate_up_M2F, d_gate_up_M2F, width, BLOCK=BLOCK, **plain_options(num_warps=4)
        )
    return d_gate_up_M2F


def silu_multiply_forward(gate_up_M2F: torch.Tensor, out_MF: torch.Tensor | None = None) -> torch.Tensor:
    """Returns silu(gate) * up, `[M, F]`, in `out_MF` where given; on the meta device only its memory."""
    if gate_up_M2F.is_meta or not len(gate_up_M2F):
        shape = len(gate_up_M2F), gate_up_M2F.shape[1] // 2
        return gate_up_M2F.new_empty(shape) if out_MF is None else out_MF
    return silu_multiply(gate_up_M2F, out_MF)


def silu_multiply_backward(
    d_MF: torch.Tensor, gate_up_M2F: torch.Tensor, in_place: bool = False
) -> torch.Tensor:
    """Returns the gradient of the packed `[M, 2F]` gate and up projections; both inputs are contiguous.

    `in_place`: it takes the place of the projections.
    """
    if d_MF.is_cuda or d_MF.is_meta:
        return silu_multiply_backward_triton(d_MF, gate_up_M2F, in_place)
    d_gate_up_M2F = silu_multiply_backward_reference(d_MF, gate_up_M2F)
    return gate_up_M2F.copy_(d_gate_up_M2F) if in_place else d_gate_up_M2F
