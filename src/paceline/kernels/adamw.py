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

    @property
    def numbers(self) -> tuple[float, ...]:
        """What kernels get."""
        shares = 1 - self.beta1, self.beta2, 1 - self.beta2
        return self.step_size, self.second_root, *shares, self.keep, ADAM_EPSILON


@triton.jit
def load_gradient(gradient_ptr, scale_ptr, master, at, mask):
    gradient = tl.zeros_like(master)
    if gradient_ptr is not None:
        gradient = tl.load(gradient_ptr + at, mask=mask, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    return gradient


@triton.jit
def adam_step(first, second, master, gradient, numbers):
    """Returns both moments, the root of the second, and the master after a step."""
    step_size, second_root, first_share, beta2, second_share, keep, epsilon = numbers
    first += first_share * (gradient - first)
    second = second * beta2 + gradient * gradient * second_share
    root = tl.sqrt_rn(second)
    return first, second, root, master * keep - step_size * (first / (root / second_root + epsilon))


@triton.jit
def store_master(parameter_ptr, master_ptr, master, at, mask):
    """Stores the master, and the parameter unless that is None: the master itself."""
    tl.store(master_ptr + at, master, mask=mask)
    if parameter_ptr is not None:
        tl.store(parameter_ptr + at, master.to(parameter_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _adamw_kernel(
    parameter_ptr, master_ptr, moments, gradient_ptr, scale_ptr, size, numbers, BLOCK: tl.constexpr
):
    first_ptr, second_ptr = moments
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    first = tl.load(first_ptr + at, mask=mask, other=0.0)
    second = tl.load(second_ptr + at, mask=mask, other=0.0)
    master = tl.load(master_ptr + at, mask=mask, other=0.0)
    gradient = load_gradient(gradient_ptr, scale_ptr, master, at, mask)
    first, second, _, master = adam_step(first, second, master, gradient, numbers)
    tl.store(first_ptr + at, first, mask=mask)
    tl.store(second_ptr + at, second, mask=mask)
    store_master(parameter_ptr, master_ptr, master, at, mask)


def written_beside(parameter: torch.Tensor, master: torch.Tensor) -> torch.Tensor | None:
    """Returns the parameter where it is not the master itself."""
    return None if master.data_ptr() == parameter.data_ptr() else parameter


def adamw_triton(parameter, master, first, second, gradient, scale, step):
    if master.dtype != torch.float32:
        return adamw.reference(parameter, master, first, second, gradient, scale, step)
    size = master.numel()
    gradient = None if gradient is None else gradient.contiguous()
    copy, moments = written_beside(parameter, master), (first, second)
    _adamw_kernel[(cdiv(size, BLOCK),)](
        copy, master, moments, gradient, scale, size, step.numbers, BLOCK=BLOCK, **plain_options(num_warps=4)
    )


@reference_of(adamw_triton)
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
    if written_beside(parameter, master) is not None:
        parameter.copy_(master)
