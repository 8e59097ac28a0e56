"""Accuracy on held-out problems: avg@n and pass@k with confidence intervals, from seeds of their own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import EvalConfig
from paceline.rollout.sampler import GroupSampler
from paceline.tasks.base import Problem
from paceline.types import Group, Purpose, SamplingParams

# Standard errors on either side of a mean that make a 95% interval.
NORMAL_95 = 1.96


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and the half width of its 95% interval."""

    value: float
    margin: float

    def __str__(self) -> str:
        return f"{100 * self.value:.1f}% ± {100 * self.margin:.1f}"


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation."""

    accuracy: Estimate  # avg@n
    pass_at: dict[int, Estimate]
    mean_length: float  # tokens of a response
    truncated: float  # share of the responses
    problems: int
    samples: int  # per problem

    def metrics(self) -> dict[str, float]:
        """Returns the numbers under their `eval/` names (docs/metrics.md)."""
        values = {
            "eval/accuracy": self.accuracy.value,
            "eval/accuracy_margin": self.accuracy.margin,
            "eval/length_mean": self.mean_length,
            "eval/truncated": self.truncated,
            "eval/problems": self.problems,
        }
        for k, estimate in self.pass_at.items():
            values |= {f"eval/pass@{k}": estimate.value, f"eval/pass@{k}_margin": estimate.margin}
        return values


def evaluate(sampler: GroupSampler, problems: Sequence[Problem], config: EvalConfig) -> Evaluation:
    """Samples and scores held-out problems; seeds are the same at every step, so only the policy differs."""
    problems = problems[: config.problems or None]
    sampling = SamplingParams(config.temperature, config.max_tokens, config.top_p)
    groups = sampler.sample(problems, Purpose.EVAL, 0, config.samples, sampling)
    sampler.take_stats()  # they are not the next rollout's
    return summarise(groups, config.pass_k)


def summarise(groups: Sequence[Group], pass_k: Sequence[int]) -> Evaluation:
    """Returns accuracy, pass@k and lengths of scored groups."""
    correct = [sum(sample.score.correct for sample in group.samples) for group in groups]
    completions = [sample.completion for group in groups for sample in group.samples]
    samples = len(groups[0].samples)
    return Evaluation(
        accuracy=estimate([c / samples for c in correct]),
        pass_at={k: estimate([pass_at_k(samples, c, k) for c in correct]) for k in pass_k},
        mean_length=sum(len(c.tokens) for c in completions) / len(completions),
        truncated=sum(c.truncated for c in completions) / len(completions),
        problems=len(groups),
        samples=samples,
    )


def estimate(values: Sequence[float]) -> Estimate:
    """Returns mean and margin of per-problem values.

    Problems are the independent draws and samples of one problem are not, so the variance is that between
    problems.
    """
    count = len(values)
    mean = sum(values) / count
    variance = sum((v - mean) ** 2 for v in values) / max(1, count - 1)
    return Estimate(mean, NORMAL_95 * math.sqrt(variance / count))


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Returns the chance that one of k draws without replacement is correct (Chen et al. 2021, eq. 1)."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
