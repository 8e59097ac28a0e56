"""The sources of a step's groups.

`LiveRollouts` asks a backend and scores completions as they arrive; `SavedRollouts` reads what an earlier run
wrote. The loop cannot tell them apart.
"""

from pathlib import Path
from typing import Protocol

from paceline.config import RolloutConfig
from paceline.rollout.sampler import GroupSampler
from paceline.rollout.samples import read_groups
from paceline.stats import RolloutStats
from paceline.tasks.order import ProblemOrder
from paceline.types import Group, Purpose, SamplingParams


class RolloutSource(Protocol):
    """What the loop asks for a step's groups."""

    def collect(self, step: int) -> list[Group]:
        """Returns the groups that step `step` learns from, in prompt order."""

    def take_stats(self) -> RolloutStats:
        """Returns the backend's statistics since the last call."""


class LiveRollouts:
    """Samples every step's groups with the current policy, from the next problems in order."""

    def __init__(
        self, sampler: GroupSampler, order: ProblemOrder, prompts: int, samples: int, sampling: SamplingParams
    ) -> None:
        self.sampler = sampler
        self.order = order
        self.prompts = prompts
        self.samples = samples
        self.sampling = sampling

    def collect(self, step: int) -> list[Group]:
        problems = self.order.take(self.prompts)
        return self.sampler.sample(problems, Purpose.TRAIN, step, self.samples, self.sampling)

    def take_stats(self) -> RolloutStats:
        return self.sampler.take_stats()


class SavedRollouts:
    """Replays `paceline rollout --save`: step n learns from the n-th saved file, cycling through them."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("step_*.jsonl"))
        if not self.files:
            raise FileNotFoundError(
                f"{folder} holds no step_*.jsonl; make some with `paceline rollout --save {folder}`"
            )

    def collect(self, step: int) -> list[Group]:
        return read_groups(self.files[(step - 1) % len(self.files)])

    def take_stats(self) -> RolloutStats:
        return RolloutStats()


def training_params(rollout: RolloutConfig) -> SamplingParams:
    """Returns the sampling parameters of a run's training responses."""
    return SamplingParams(temperature=rollout.temperature, max_tokens=rollout.max_tokens)
