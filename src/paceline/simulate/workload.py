"""What is to be generated in a step: prompts x samples, with response lengths that have a long tail."""

import dataclasses
from dataclasses import dataclass
from typing import Self

import numpy as np

from paceline.bench.lengths import LengthDistribution
from paceline.simulate.hardware import Origin, Source


@dataclass(frozen=True)
class Lengths(LengthDistribution):
    """A distribution of response lengths that says where it comes from: log-normal, fixed, or observed."""

    mean: float = 2048.0
    sigma: float = 1.0
    low: int = 16
    high: int = 32768
    observed: tuple[int, ...] = ()  # non-empty: drawn from these, and the rest is ignored
    origin: Origin = Origin(Source.ASSUMED, "log-normal lengths")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `fixed:N` or `lognormal:MEAN,SIGMA,MIN,MAX`."""
        return dataclasses.replace(super().parse(text), origin=Origin(Source.ASSUMED, f"lengths {text}"))

    @property
    def longest(self) -> int:
        """Returns the longest response that may be drawn."""
        return max(self.observed, default=0) or self.high

    def draw(self, count: int, seed: int) -> np.ndarray:
        """Draws that many lengths."""
        rng = np.random.default_rng(seed)
        if self.observed:
            return rng.choice(np.array(self.observed), size=count)
        drawn = rng.lognormal(self.mu, self.sigma, size=count)
        return np.clip(np.floor(drawn + 1e-9), self.low, self.high).astype(np.int64)


@dataclass(frozen=True)
class Workload:
    """The prompts of one RL step and the responses to them."""

    prompts: int = 256
    samples_per_prompt: int = 16
    prompt_tokens: int = 256
    lengths: Lengths = Lengths()

    @property
    def responses(self) -> int:
        """Returns how many responses a step has."""
        return self.prompts * self.samples_per_prompt

    def draw(self, seed: int) -> np.ndarray:
        """Draws the response lengths in order; samples of one prompt are neighbours."""
        return self.lengths.draw(self.responses, seed)
