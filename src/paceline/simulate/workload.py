"""What is to be generated in a step: prompts x samples, with response lengths that have a long tail."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from paceline.simulate.hardware import Origin, Source


@dataclass(frozen=True)
class Lengths:
    """A distribution of response lengths with its origin.

    It is log-normal, with this mean before it is cut to [low, high], or observed.
    """

    mean: float = 2048.0
    sigma: float = 1.0
    low: int = 16
    high: int = 32768
    observed: tuple[int, ...] = ()  # non-empty: drawn from these, and the rest is ignored
    origin: Origin = Origin(Source.ASSUMED, "log-normal lengths")

    @property
    def longest(self) -> int:
        return max(self.observed, default=0) or self.high

    def scaled(self, factor: float) -> "Lengths":
        if factor == 1.0:
            return self
        return dataclasses.replace(
            self,
            mean=self.mean * factor,
            low=max(1, round(self.low * factor)),
            high=max(1, round(self.high * factor)),
            observed=tuple(max(1, round(n * factor)) for n in self.observed),
            origin=Origin(Source.ASSUMED, f"{factor:g} times: {self.origin.note}"),
        )

    def draw(self, count: int, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        if self.observed:
            return rng.choice(np.array(self.observed), size=count)
        mu = math.log(self.mean) - self.sigma**2 / 2
        drawn = np.floor(rng.lognormal(mu, self.sigma, size=count) + 1e-9)
        return np.clip(drawn, self.low, self.high).astype(np.int64)


@dataclass(frozen=True)
class Workload:
    """The prompts of one RL step and the responses to them."""

    prompts: int = 256
    samples_per_prompt: int = 16
    prompt_tokens: int = 256
    lengths: Lengths = Lengths()

    @property
    def responses(self) -> int:
        return self.prompts * self.samples_per_prompt

    def draw(self, seed: int) -> np.ndarray:
        """Draws the response lengths in order; samples of one prompt are neighbours."""
        return self.lengths.draw(self.responses, seed)
