"""What is to be generated in a step: prompts x samples, with response lengths that have a long tail."""

import random
from dataclasses import dataclass

import numpy as np

from paceline.simulate.hardware import Origin, Source


@dataclass(frozen=True)
class Lengths:
    """A distribution of response lengths: log-normal, fixed, or values drawn from a run."""

    mean: float = 2048.0
    sigma: float = 1.0
    low: int = 16
    high: int = 32768
    observed: tuple[int, ...] = ()  # non-empty: drawn from these, and the rest is ignored
    origin: Origin = Origin(Source.ASSUMED, "log-normal lengths")

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        kind, _, numbers = text.partition(":")
        try:
            if kind == "fixed":
                return cls(
                    float(numbers), 0.0, 1, int(numbers), origin=Origin(Source.ASSUMED, f"lengths {text}")
                )
            if kind == "lognormal":
                mean, sigma, low, high = (float(x) for x in numbers.split(","))
                if mean > 0 and sigma >= 0 and 1 <= low <= high:
                    return cls(
                        mean, sigma, int(low), int(high), origin=Origin(Source.ASSUMED, f"lengths {text}")
                    )
        except ValueError:
            pass
        raise ValueError(
            f"--lengths {text!r}: use fixed:N or lognormal:MEAN,SIGMA,MIN,MAX, such as "
            "lognormal:4096,1.0,16,32768"
        )

    def draw(self, count: int, seed: int) -> np.ndarray:
        """MEAN is that of the log-normal before it is cut to [low, high], as in `paceline bench rollout`."""
        rng = np.random.default_rng(seed)
        if self.observed:
            return rng.choice(np.array(self.observed), size=count)
        drawn = rng.lognormal(np.log(self.mean) - self.sigma**2 / 2, self.sigma, size=count)
        return np.clip(np.floor(drawn + 1e-9), self.low, self.high).astype(np.int64)

    def draw_as_bench(self, count: int) -> np.ndarray:
        """The very lengths of `paceline bench rollout` and of the vLLM measurement: Python's generator, seed
        0, in order.
        """
        rng = random.Random(0)
        drawn = (rng.lognormvariate(np.log(self.mean) - self.sigma**2 / 2, self.sigma) for _ in range(count))
        return np.array([max(self.low, min(self.high, int(x))) for x in drawn])


@dataclass(frozen=True)
class Workload:
    prompts: int = 256
    samples_per_prompt: int = 16
    prompt_tokens: int = 256
    lengths: Lengths = Lengths()

    @property
    def responses(self) -> int:
        return self.prompts * self.samples_per_prompt

    def draw(self, seed: int) -> np.ndarray:
        """Response lengths in order; samples of one prompt are neighbours."""
        return self.lengths.draw(self.responses, seed)
