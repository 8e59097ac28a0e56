"""One figure predicted, one measured; sections of them with what is to be said about them."""

from dataclasses import dataclass, field
from statistics import median

FIT, PREDICTION = "fit", "prediction"


@dataclass(frozen=True)
class Check:
    what: str
    measured: float
    predicted: float
    unit: str
    kind: str  # `fit`: the model has seen this figure; `prediction`: it has not

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Section:
    title: str
    source: str
    checks: tuple[Check, ...]
    remarks: tuple[str, ...] = ()
    charts: dict[str, str] = field(default_factory=dict)  # file name: SVG


def predictions(checks: tuple[Check, ...] | list[Check]) -> list[Check]:
    return [check for check in checks if check.kind == PREDICTION]


def median_error(checks: list[Check]) -> float:
    return median(abs(check.error) for check in checks)


def worst_error(checks: list[Check]) -> float:
    return max(abs(check.error) for check in checks)


def summary(checks: list[Check]) -> str:
    return f"{len(checks)} points, median {100 * median_error(checks):.1f}%, worst {100 * worst_error(checks):.1f}%"
