"""Products whose result is wider than their factors: scores of the vocabulary and of routers."""

import torch
import torch.nn.functional as F


def wide_linear(x_TE: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
    """Returns x times weight transposed in float32 (float64 for a float64 model)."""
    if weight_VE.dtype in (torch.float32, torch.float64):
        return F.linear(x_TE, weight_VE)
    return _WideLinear.apply(x_TE, weight_VE)


class _WideLinear(torch.autograd.Function):
    """bf16 x bf16 -> float32 without rounding to bf16; on a GPU without a float32 copy of the weight."""

    @staticmethod
    def forward(ctx, x_TE: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_TE, weight_VE)
        if x_TE.is_cuda or x_TE.is_meta:
            return torch.mm(x_TE, weight_VE.t(), out_dtype=torch.float32)
        return x_TE.float() @ weight_VE.float().t()

    @staticmethod
    def backward(ctx, grad_TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_TE, weight_VE = ctx.saved_tensors
        grad_TV = grad_TV.to(x_TE.dtype)
        needs_x, needs_weight = ctx.needs_input_grad
        return grad_TV @ weight_VE if needs_x else None, grad_TV.t() @ x_TE if needs_weight else None
