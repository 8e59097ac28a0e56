"""Accuracy on held-out problems: avg@n and pass@k, with confidence intervals, from noise of its own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import EvalConfig
from paceline.rollout.sampler import GroupSampler
from paceline.tasks.base import Problem
from paceline.types import Group, Purpose, SamplingParams


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and the half width of its 95% interval."""

    value: float
    margin: float

    def __str__(self) -> str:
        return f"{100 * self.value:.1f}% ± {100 * self.margin:.1f}"


@dataclass(frozen=True)
class Evaluation:
    accuracy: Estimate  # avg@n
    pass_at: dict[int, Estimate]
    mean_length: float
    truncated: float
    problems: int
    samples: int

    def metrics(self) -> dict[str, float]:
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
    """The same problems and the same noise every time, whatever the step: only the policy differs."""
    problems = problems[: config.problems or None]
    sampling = SamplingParams(config.temperature, config.max_tokens, config.top_p)
    groups = sampler.sample(problems, Purpose.EVAL, 0, config.samples, sampling)
    sampler.backend.take_stats()
    return summarise(groups, config.pass_k)


def summarise(groups: Sequence[Group], pass_k: Sequence[int]) -> Evaluation:
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
    """Problems are the independent draws; samples of one problem are not, so the spread is taken between
    problems.
    """
    count, mean = len(values), sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / max(1, count - 1)
    return Estimate(mean, 1.96 * math.sqrt(variance / count))


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased chance that one of k draws without replacement is correct (Chen et al. 2021, eq. 1)."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
