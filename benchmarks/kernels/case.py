"""One case of a kernel benchmark, and the figures that it gives."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.bench.spread import Spread


@dataclass(frozen=True)
class KernelCase:
    """A kernel at one size. The two calls launch `copies` times, each over operands of its own."""

    kernel: str
    size: str
    copies: int
    run: Callable[[], object]
    run_torch: Callable[[], object] | None  # None: torch has no equivalent
    error: Callable[[], float]  # of the kernel against torch, relative to the norm of the result
    tolerance: float
    # What one launch cannot do without; 0 where that does not bound its time.
    num_bytes: float = 0.0
    flops: float = 0.0
    fp8: bool = False  # the operations are FP8's


@dataclass(frozen=True)
class KernelPoint:
    """What a case measured. A kernel that is wrong is not timed."""

    kernel: str
    size: str
    error: float
    correct: bool
    microseconds: Spread | None
    torch_microseconds: Spread | None
    limit_microseconds: float | None  # by memory or arithmetic, whichever takes longer


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the norm of the difference over the norm of what was expected; NaN counts as infinite."""
    difference = (actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    return float(difference.nan_to_num(torch.inf))
