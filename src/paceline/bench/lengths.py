"""Distributions of output lengths as they are given on a command line, for measuring and for simulating."""

import math
import random
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class LengthDistribution:
    """A log-normal with this mean before it is cut to [low, high]."""

    mean: float
    sigma: float
    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `fixed:N` or `lognormal:MEAN,SIGMA,MIN,MAX`."""
        kind, _, numbers = text.partition(":")
        try:
            if kind == "fixed" and int(numbers) >= 1:
                return cls(float(numbers), 0.0, int(numbers), int(numbers))
            if kind == "lognormal":
                mean, sigma, low, high = (float(x) for x in numbers.split(","))
                finite = all(math.isfinite(x) for x in (mean, sigma * sigma, high))
                if finite and mean > 0 and sigma >= 0 and 1 <= low <= high:
                    return cls(mean, sigma, int(low), int(high))
        except ValueError:
            pass
        raise ValueError(
            f"--lengths {text!r}: use fixed:N or lognormal:MEAN,SIGMA,MIN,MAX, "
            "such as lognormal:512,1.0,16,4096"
        )

    @property
    def mu(self) -> float:
        """Returns the mean of the logarithm."""
        return math.log(self.mean) - self.sigma**2 / 2

    def bench_values(self, count: int) -> tuple[int, ...]:
        """Returns the lengths that `paceline bench rollout` asks for: always the same ones, in order."""
        rng = random.Random(0)
        drawn = (rng.lognormvariate(self.mu, self.sigma) for _ in range(count))
        return tuple(max(self.low, min(self.high, int(x))) for x in drawn)


@dataclass(frozen=True)
class Lengths:
    """The output lengths of one measurement, one per request."""

    values: tuple[int, ...]

    @classmethod
    def parse(cls, text: str, count: int) -> "Lengths":
        return cls(LengthDistribution.parse(text).bench_values(count))
