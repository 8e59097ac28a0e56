"""One AdamW step of one parameter, in place: master, moments and the parameter's own rounded copy.

Decoupled weight decay (arXiv 1711.05101, algorithm 2), with g the gradient times `scale`:

    first  += (1 - beta1) (g - first)          second = beta2 second + (1 - beta2) g^2
    master  = (1 - lr decay) master - lr / (1 - beta1^t) first / (sqrt(second) / sqrt(1 - beta2^t) + epsilon)

On a GPU that is one pass over memory and one launch: the gradient is read in its own type, and the new weight
is written in the parameter's as well as in the master's.
"""

import math
from dataclasses import dataclass

import torch

from paceline.kernels.operation import cdiv, reference_of
from paceline.kernels.training_launch import plain_options
from paceline.kernels.triton_support import tl, triton

# Added to the root of the second moment.
ADAM_EPSILON = 1e-8
# Elements that a program updates.
BLOCK = 2048


@dataclass(frozen=True)
class AdamWStep:
    """The numbers of one step: which it is (from 1), learning rate, decay rates and weight decay."""

    number: int
    learning_rate: float
    beta1: float
    beta2: float
    weight_decay: float

    @property
    def step_size(self) -> float:
        """The learning rate, corrected for the first moment's start at zero."""
        return self.learning_rate / (1 - self.beta1**self.number)

    @property
    def second_root(self) -> float:
        """The root of the second moment's correction for its start at zero."""
        return math.sqrt(1 - self.beta2**self.number)

    @property
    def keep(self) -> float:
        """The share of the weights that decay leaves."""
        return 1 - self.learning_rate * self.weight_decay


@triton.jit
def _adamw_kernel(
    parameter_ptr,
    master_ptr,
    first_ptr,
    second_ptr,
    gradient_ptr,
    scale_ptr,
    size,
    step_size,
    second_root,
    first_share,
    beta2,
    second_share,
    keep,
    epsilon,
    HAS_GRADIENT: tl.constexpr,
    HAS_COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    first = tl.load(first_ptr + at, mask=mask, other=0.0)
    second = tl.load(second_ptr + at, mask=mask, other=0.0)
    master = tl.load(master_ptr + at, mask=mask, other=0.0)
    gradient = tl.zeros((BLOCK,), tl.float32)
    if HAS_GRADIENT:
        gradient = tl.load(gradient_ptr + at, mask=mask, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    first += first_share * (gradient - first)
    second = second * beta2 + gradient * gradient * second_share
    master = master * keep - step_size * (first / (tl.sqrt_rn(second) / second_root + epsilon))
    tl.store(first_ptr + at, first, mask=mask)
    tl.store(second_ptr + at, second, mask=mask)
    tl.store(master_ptr + at, master, mask=mask)
    if HAS_COPY:
        tl.store(parameter_ptr + at, master.to(parameter_ptr.dtype.element_ty), mask=mask)


def adamw_triton(parameter, master, first, second, gradient, scale, step):
    size = master.numel()
    _adamw_kernel[(cdiv(size, BLOCK),)](
        parameter,
        master,
        first,
        second,
        None if gradient is None else gradient.contiguous(),
        scale,
        size,
        step.step_size,
        step.second_root,
        1 - step.beta1,
        step.beta2,
        1 - step.beta2,
        step.keep,
        ADAM_EPSILON,
        HAS_GRADIENT=gradient is not None,
        HAS_COPY=master.data_ptr() != parameter.data_ptr(),
        BLOCK=BLOCK,
        **plain_options(num_warps=4),
    )


@reference_of(adamw_triton, lambda parameter, master, *_: master.is_cuda and master.dtype == torch.float32)
def adamw(
    parameter: torch.Tensor,
    master: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    gradient: torch.Tensor | None,
    scale: torch.Tensor,
    step: AdamWStep,
) -> None:
    """Updates master, moments and parameter; the master may be the parameter itself.

    All are contiguous; `scale` is one number on their device, by which the gradient is multiplied. A gradient
    of None counts as zeros.
    """
    scaled = torch.zeros_like(master) if gradient is None else gradient.to(master.dtype) * scale
    first.lerp_(scaled, 1 - step.beta1)
    second.mul_(step.beta2).addcmul_(scaled, scaled, value=1 - step.beta2)
    denominator = second.sqrt().div_(step.second_root).add_(ADAM_EPSILON)
    if step.weight_decay:
        master.mul_(step.keep)
    master.addcdiv_(first, denominator, value=-step.step_size)
    if master.data_ptr() != parameter.data_ptr():
        parameter.copy_(master)
