"""Repeated measurements as a median with its spread."""

import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The median of repeated measurements, the lowest and the highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Returns the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"
