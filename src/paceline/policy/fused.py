"""What lies between the products of a layer, as learning computes it with kernels, and what it keeps of it.

Each operation has its kernels in `kernels/*_training.py`; here they become differentiable. Their outputs are
cheap to recompute, so a layer may keep only what products and attention returned (`Recompute`): a product
that would keep its normed or activated input keeps a way to compute it instead.

        kept           recomputed in the backward pass
        total      ──▶ normed ──▶ [qkv] ──▶ ...
        gate_up    ──▶ silu(gate) up ──▶ [down]
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import record_function

from paceline.kernels.norm_training import fork_norm, rms_norm_backward
from paceline.kernels.rope_training import rotate_qk, rotate_qk_backward
from paceline.kernels.swiglu_training import silu_multiply_backward, silu_multiply_forward

# Marks in a profile what a backward pass computes again.
RECOMPUTE_LABEL = "paceline::recompute"


@dataclass(frozen=True)
class Recompute:
    """What the backward pass computes again instead of keeping it."""

    # Whole layers, counted from the first.
    layers: int = 0
    # In the other layers, what lies between products (on a GPU).
    between: bool = True
    # The scores of the vocabulary (on a GPU).
    logits: bool = False

    def __str__(self) -> str:
        layers = "all layers" if self.layers >= EVERYTHING.layers else f"{self.layers} layers"
        chosen = [
            layers if self.layers else "",
            "between products" if self.between and layers != "all layers" else "",
            "logits" if self.logits else "",
        ]
        return ", ".join(part for part in chosen if part) or "nothing"


EVERYTHING = Recompute(layers=1 << 30, logits=True)


class _ForkNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TE, residual_TE, weight_E, epsilon):
        normed_TE, total_TE = fork_norm(x_TE, residual_TE, weight_E, epsilon)
        ctx.save_for_backward(total_TE, weight_E)
        ctx.epsilon, ctx.has_residual = epsilon, residual_TE is not None
        ctx.set_materialize_grads(False)
        return normed_TE, total_TE.view_as(total_TE) if residual_TE is None else total_TE

    @staticmethod
    def backward(ctx, d_normed_TE, d_total_TE):
        total_TE, weight_E = ctx.saved_tensors
        d_TE, d_weight_E = rms_norm_backward(
            d_normed_TE.contiguous(),
            None if d_total_TE is None else d_total_TE.contiguous(),
            total_TE,
            weight_E,
            ctx.epsilon,
            ctx.needs_input_grad[2],
        )
        return d_TE, d_TE if ctx.has_residual else None, d_weight_E, None


class _RotateQK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv_TN, rope_T2C, heads, kv_heads, q_norm_D, k_norm_D, epsilon):
        q_THD, k_THD = rotate_qk(qkv_TN, rope_T2C, heads, kv_heads, q_norm_D, k_norm_D, epsilon)
        ctx.save_for_backward(None if q_norm_D is None else qkv_TN, rope_T2C, q_norm_D, k_norm_D)
        ctx.epsilon = epsilon
        return q_THD, k_THD, qkv_TN.unflatten(1, (heads + 2 * kv_heads, -1))[:, heads + kv_heads :]

    @staticmethod
    def backward(ctx, d_q_THD, d_k_THD, d_v_THD):
        qkv_TN, rope_T2C, q_norm_D, k_norm_D = ctx.saved_tensors
        d_qkv_TN, d_q_norm_D, d_k_norm_D = rotate_qk_backward(
            d_q_THD.contiguous(),
            d_k_THD.contiguous(),
            d_v_THD.contiguous(),
            qkv_TN,
            rope_T2C,
            q_norm_D,
            k_norm_D,
            ctx.epsilon,
        )
        return d_qkv_TN, None, None, None, d_q_norm_D, d_k_norm_D, None


class _SiluMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_T2F):
        ctx.save_for_backward(gate_up_T2F)
        return silu_multiply_forward(gate_up_T2F)

    @staticmethod
    def backward(ctx, d_TF):
        return silu_multiply_backward(d_TF.contiguous(), ctx.saved_tensors[0])


def fused_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor | None, weight_E: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (norm(x + residual), x + residual); the second takes x's place: gradients meet there."""
    return _ForkNorm.apply(x_TE, residual_TE, weight_E, epsilon)


def fused_rotation(
    qkv_TN: torch.Tensor,
    rope_T2C: torch.Tensor,
    heads: int,
    kv_heads: int,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q, k (normed where there is a norm, and rotated) and v of a packed projection."""
    return _RotateQK.apply(qkv_TN, rope_T2C, heads, kv_heads, q_norm_D, k_norm_D, epsilon)


def fused_silu_multiply(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    return _SiluMultiply.apply(gate_up_T2F)


class _WithValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def with_value(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns the second tensor's numbers with the first one's gradient."""
    return _WithValue.apply(x, value)


@contextmanager
def made_again(
    tensors: Sequence[torch.Tensor], make: Callable[[], Sequence[torch.Tensor]], wanted: bool = True
) -> Iterator[None]:
    """Operations inside that would keep `tensors` for their backward pass keep `make` instead.

    `make` returns the same numbers again, and must keep less memory alive than the tensors do.
    """
    if not wanted or not torch.is_grad_enabled():
        yield
        return
    kinds = [(tensor.untyped_storage()._cdata, tensor.shape) for tensor in tensors]
    remade: dict[int, torch.Tensor] = {}

    def pack(saved: torch.Tensor) -> torch.Tensor | int:
        kind = (saved.untyped_storage()._cdata, saved.shape)
        return kinds.index(kind) if kind in kinds else saved.detach()

    def unpack(kept: torch.Tensor | int) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        if kept not in remade:
            with torch.no_grad(), record_function(RECOMPUTE_LABEL):
                remade.update(enumerate(make()))
        return remade.pop(kept)  # each is requested once, so that none outlives its use

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
