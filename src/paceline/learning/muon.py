"""Muon's step of one matrix: its momentum with all singular values made equal (arXiv 2502.16982).

AdamW moves every weight by about the learning rate, so a step lies mostly in the few directions in which
gradients agree. Muon moves every direction by as much, and so takes fewer steps; each costs some products of
the matrix with itself. The step is scaled to the size that AdamW's usually has.
"""

import math

import torch

from paceline.kernels.adamw import AdamWStep

# Momentum, in Nesterov's form.
MOMENTUM = 0.95
# Root mean square of AdamW's usual steps, in learning rates.
ADAMW_SIZE = 0.2
# Odd polynomials a x + b x^3 + c x^5 that take all singular values to about 1 (Newton-Schulz).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
# Keeps a matrix of zeros finite.
EPSILON = 1e-7


class MuonState:
    """A float32 master and the momentum of a matrix, where the parameter is."""

    def __init__(self, parameter: torch.Tensor, rate: float = 1.0) -> None:
        """`rate`: its learning rate as a multiple of that of the parameters under AdamW."""
        wide = parameter.dtype in (torch.float32, torch.float64)
        self.master = parameter.detach() if wide else parameter.detach().float()
        self.momentum = torch.zeros_like(self.master)
        self.rate = rate

    def moments(self) -> dict[str, torch.Tensor]:
        return {"momentum": self.momentum}

    def step(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor | None,
        scale: torch.Tensor,
        step: AdamWStep,
    ) -> None:
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        gradient = gradient.to(self.master.dtype) * scale
        self.momentum.mul_(MOMENTUM).add_(gradient)
        direction = orthogonalised(gradient.add_(self.momentum, alpha=MOMENTUM))
        rate = self.rate * step.learning_rate
        self.master.mul_(1 - rate * step.weight_decay)
        self.master.add_(direction, alpha=-rate * ADAMW_SIZE * math.sqrt(max(direction.shape)))
        if parameter.data_ptr() != self.master.data_ptr():
            parameter.copy_(self.master)


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Returns a matrix with its singular vectors and singular values between about 0.7 and 1.2."""
    # Rounding of the products does not matter: the values need not be exactly 1.
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / (x.norm() + EPSILON)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrix.dtype)
