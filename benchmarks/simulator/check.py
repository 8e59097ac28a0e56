"""One figure predicted, one measured; sections of them with their remarks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

FIT = "fit"  # the model has seen the figure
PREDICTION = "prediction"  # it has not


@dataclass(frozen=True)
class Check:
    """A measured or published figure beside the model's."""

    what: str
    measured: float
    predicted: float
    unit: str = "x"
    kind: str = PREDICTION

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Section:
    """One part of the page."""

    title: str
    source: str
    checks: tuple[Check, ...]
    remarks: tuple[str, ...] = ()
    charts: dict[str, str] = field(default_factory=dict)  # file name: SVG


def predictions(checks: Sequence[Check]) -> list[Check]:
    """Returns the checks of figures that the model has not seen."""
    return [check for check in checks if check.kind == PREDICTION]


def median_error(checks: Sequence[Check]) -> float:
    return median(abs(check.error) for check in checks)


def worst_error(checks: Sequence[Check]) -> float:
    return max(abs(check.error) for check in checks)


def summary(checks: Sequence[Check]) -> str:
    errors = f"median {100 * median_error(checks):.1f}%, worst {100 * worst_error(checks):.1f}%"
    return f"{len(checks)} points, {errors}"
