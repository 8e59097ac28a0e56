"""Held-out problems: reward, avg@n and pass@k with confidence intervals, from seeds of their own."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.config import EvalConfig
from paceline.rollout.sampler import GroupSampler
from paceline.tasks.base import Problem
from paceline.types import Group, Precision, Purpose, SamplingParams

# Standard errors on either side of a mean that make a 95% interval.
NORMAL_95 = 1.96


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def margin(self) -> float:
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        return f"{100 * self.value:.1f}% [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation."""

    accuracy: Estimate  # avg@n
    reward: Estimate
    pass_at: dict[int, Estimate]
    mean_length: float  # tokens of a response
    truncated: float  # share of the responses
    problems: int
    samples: int  # per problem
    precision: Precision = Precision.BASE  # in which they were sampled

    def metrics(self) -> dict[str, float]:
        """Returns the metrics under their `eval/` names (docs/metrics.md)."""
        values = {
            "eval/accuracy": self.accuracy.value,
            "eval/accuracy_margin": self.accuracy.margin,
            "eval/accuracy_low": self.accuracy.low,
            "eval/accuracy_high": self.accuracy.high,
            "eval/reward": self.reward.value,
            "eval/reward_low": self.reward.low,
            "eval/reward_high": self.reward.high,
            "eval/length_mean": self.mean_length,
            "eval/truncated": self.truncated,
            "eval/problems": self.problems,
            "eval/base_precision": float(self.precision is Precision.BASE),
        }
        for k, estimate in self.pass_at.items():
            values |= {
                f"eval/pass@{k}": estimate.value,
                f"eval/pass@{k}_margin": estimate.margin,
                f"eval/pass@{k}_low": estimate.low,
                f"eval/pass@{k}_high": estimate.high,
            }
        return values

    @property
    def graded(self) -> bool:
        """Whether the rewards grade responses beyond right and wrong."""
        return self.reward.value != self.accuracy.value

    def __str__(self) -> str:
        reward = self.reward
        graded = f", reward {reward.value:.3f} [{reward.low:.3f}, {reward.high:.3f}]" if self.graded else ""
        precision = "" if self.precision is Precision.BASE else f" in {self.precision}"
        return f"accuracy {self.accuracy}{graded}{precision}"


def evaluate(
    sampler: GroupSampler,
    problems: Sequence[Problem],
    config: EvalConfig,
    stopped: Callable[[], bool] | None = None,
) -> Evaluation:
    """Samples and scores held-out problems; seeds are the same at every step, so only the policy differs.

    Raises `SamplingStopped` once the backend is paused and `stopped` returns True.
    """
    problems = problems[: config.problems or None]
    sampling = SamplingParams(config.temperature, config.max_tokens, config.top_p)
    groups = sampler.sample(problems, Purpose.EVAL, 0, config.samples, sampling, stopped)
    sampler.take_stats()  # so they do not count for the next rollout
    return replace(summarise(groups, config.pass_k), precision=sampler.backend.precision)


def summarise(groups: Sequence[Group], pass_k: Sequence[int]) -> Evaluation:
    correct = [sum(sample.score.correct for sample in group.samples) for group in groups]
    completions = [sample.completion for group in groups for sample in group.samples]
    samples = len(groups[0].samples)
    return Evaluation(
        accuracy=estimate([c / samples for c in correct], samples),
        reward=estimate_reward([group.rewards for group in groups]),
        pass_at={k: estimate([pass_at_k(samples, c, k) for c in correct], samples) for k in pass_k},
        mean_length=sum(len(c.tokens) for c in completions) / len(completions),
        truncated=sum(c.truncated for c in completions) / len(completions),
        problems=len(groups),
        samples=samples,
    )


def estimate(values: Sequence[float], samples: int = 1) -> Estimate:
    """Returns the mean of per-problem shares with Wilson's interval (1927, JASA 22, 209).

    It never leaves [0, 1] and is never a point. Problems are the independent draws and samples of one problem
    are not, so the number of draws n is the one whose binomial variance p(1 - p) / n equals that of the mean
    over problems: about the number of problems where each is right or wrong, and more, up to every sample,
    where problems differ less than that. At 0 and 1 their differences are unknown, and n is the number of
    problems.
    """
    count = len(values)
    mean = min(1.0, max(0.0, sum(values) / count))
    variance = sum((v - mean) ** 2 for v in values) / max(1, count - 1) / count
    spread = mean * (1 - mean)
    draws = float(count)
    if spread > 0:
        draws = min(spread / variance, count * samples) if variance > 0 else count * samples
    z2 = NORMAL_95**2
    centre = (mean + z2 / (2 * draws)) / (1 + z2 / draws)
    half = NORMAL_95 / (1 + z2 / draws) * math.sqrt(spread / draws + z2 / (4 * draws**2))
    return Estimate(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def estimate_reward(rewards: Sequence[Sequence[float]]) -> Estimate:
    """Returns the mean reward over problems: as of shares where all lie in [0, 1], else a normal interval."""
    values = [sum(of_one) / len(of_one) for of_one in rewards]
    if all(0 <= reward <= 1 for of_one in rewards for reward in of_one):
        return estimate(values, len(rewards[0]))
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1) / len(values)
    half = NORMAL_95 * math.sqrt(variance)
    return Estimate(mean, mean - half, mean + half)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Returns the chance that one of k draws without replacement is correct (Chen et al. 2021, eq. 1)."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
