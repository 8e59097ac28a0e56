"""What an operation of this package is: a torch reference and, where Triton runs, a kernel that does it too.

The reference has the operation's name, its types and its documentation; `reference_of` puts the kernel's
launch, which takes the same arguments, before it:

    @reference_of(sample_triton)
    def sample(logits_RV, ...):         on a GPU `sample(...)` is `sample_triton(...)`
        ...                             elsewhere this; everywhere it is `sample.reference(...)`
"""

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Operation(Protocol[P, R_co]):
    """A function that runs its reference or a kernel."""

    reference: Callable[P, R_co]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def on_gpu_or_meta(x: Any) -> bool:
    """Returns whether a tensor lies on a GPU, or on the meta device, where a launch only allocates."""
    return x.is_cuda or x.is_meta


def reference_of(
    launch: Callable[..., Any], runs: Callable[[Any], bool] = attrgetter("is_cuda")
) -> Callable[[Callable[P, R_co]], Operation[P, R_co]]:
    """Makes of a reference the operation that runs `launch` where `runs` says so of its first argument."""

    def decorate(reference: Callable[P, R_co]) -> Operation[P, R_co]:
        @functools.wraps(reference)
        def run(*args: P.args, **kwargs: P.kwargs) -> R_co:
            if runs(args[0]):
                return launch(*args, **kwargs)
            return reference(*args, **kwargs)

        operation = cast(Operation[P, R_co], run)
        operation.reference = reference
        return operation

    return decorate


def next_power_of_2(n: int) -> int:
    """Returns the smallest power of 2 that is n or more."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)
