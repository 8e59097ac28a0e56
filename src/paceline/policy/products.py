"""How the learner multiplies by a projection's weight: by torch, by the rollout's kernels, or in FP8.

A product has two directions: y = x Wᵀ forward, and dx = dy W backward. With exact numerics the forward one is
the rollout's own, in FP8 where that is: its weight is on E4M3's grid already (`learning/rounded.py`), so both
sides quantise it without loss, and rows are quantised alike.

Learning in FP8 multiplies so in both directions: a transposed weight has the same blocks. The weight's own
gradient, dyᵀ x, is always computed in the policy's type: its sum runs over tokens, where quantised factors of
both sides would meet without a scale of their own.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from paceline.kernels.fp8_format import BlockMatrix
from paceline.kernels.fp8_linear import fp8_linear
from paceline.kernels.fp8_moe import fp8_run_experts
from paceline.kernels.fp8_quantise import quantise_blocks, quantise_rows
from paceline.kernels.linear import linear
from paceline.kernels.moe import run_experts


class Product(Protocol):
    """Both directions of a product with a weight `[O, I]`, and the experts' feed-forward."""

    def forward(
        self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns x times weight transposed, plus bias."""

    def backward(self, d_TO: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        """Returns d times weight."""

    def experts(
        self,
        x_TE: torch.Tensor,
        weights_TK: torch.Tensor,
        experts_TK: torch.Tensor,
        gate_up_XFE: torch.Tensor,
        down_XEF: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the weighted sum of the chosen experts' results."""


class PlainProduct:
    """Products in the policy's own type; `deterministic`: forward by the rollout's row-invariant kernel."""

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def forward(
        self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        if not self.deterministic:
            return F.linear(x_TI, weight_OI, bias_O)
        return _biased(linear(x_TI.contiguous(), weight_OI, deterministic=True), bias_O)

    def backward(self, d_TO: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        return d_TO @ weight_OI

    def experts(
        self,
        x_TE: torch.Tensor,
        weights_TK: torch.Tensor,
        experts_TK: torch.Tensor,
        gate_up_XFE: torch.Tensor,
        down_XEF: torch.Tensor,
    ) -> torch.Tensor:
        return run_experts(x_TE, weights_TK, experts_TK, gate_up_XFE, down_XEF)


class Fp8Product(PlainProduct):
    """Products as an FP8 rollout computes them; `learns`: backward, too, is in FP8."""

    def __init__(self, deterministic: bool = False, learns: bool = True) -> None:
        super().__init__(deterministic)
        self.learns = learns

    def forward(
        self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        if x_TI.is_meta:
            return F.linear(x_TI, weight_OI, bias_O)
        out_TO = fp8_linear(quantise_rows(x_TI.contiguous()), quantised(weight_OI), self.deterministic)
        return _biased(out_TO, bias_O)

    def backward(self, d_TO: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        if d_TO.is_meta or not self.learns:
            return super().backward(d_TO, weight_OI)
        d_TI = fp8_linear(quantise_rows(d_TO.contiguous()), quantised(weight_OI.t().contiguous()))
        return d_TI[:, : weight_OI.shape[1]]

    def experts(
        self,
        x_TE: torch.Tensor,
        weights_TK: torch.Tensor,
        experts_TK: torch.Tensor,
        gate_up_XFE: torch.Tensor,
        down_XEF: torch.Tensor,
    ) -> torch.Tensor:
        return fp8_run_experts(x_TE, weights_TK, experts_TK, quantised(gate_up_XFE), quantised(down_XEF))


PLAIN = PlainProduct()


def quantised(weight: torch.Tensor) -> BlockMatrix:
    """Returns a contiguous weight `[O, I]` or `[X, O, I]` in blockwise FP8."""
    out = BlockMatrix.poisoned(weight.shape, weight.device)
    quantise_blocks(weight.detach(), out)
    return out


def _biased(out_TO: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    return out_TO if bias_O is None else out_TO + bias_O


class Projection(nn.Linear):
    """An `nn.Linear` whose product can be another one than torch's."""

    # Whether rollouts multiply by it in FP8.
    in_fp8: bool = False
    # None: torch's own, differentiated by torch.
    product: Product | None = None

    def forward(self, x_TI: torch.Tensor, product: Product | None = None) -> torch.Tensor:
        """Multiplies by the weight; `product` wins over the projection's own."""
        chosen = product or self.product
        if chosen is None:
            return super().forward(x_TI)
        return _Multiply.apply(x_TI, self.weight, self.bias, chosen)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TI, weight_OI, bias_O, product):
        ctx.save_for_backward(x_TI, weight_OI)
        ctx.product = product
        return product.forward(x_TI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx, d_TO):
        x_TI, weight_OI = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            ctx.product.backward(d_TO, weight_OI) if needs_x else None,
            d_TO.t() @ x_TI if needs_weight else None,
            d_TO.sum(0) if needs_bias else None,
            None,
        )
