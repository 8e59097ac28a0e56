"""The sources of a step's groups.

`LiveRollouts` submits a step's requests and waits for all of them; `stream.py` has the source whose groups
outlive a step; `SavedRollouts` reads what an earlier run wrote. The loop uses them interchangeably.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from paceline.config import RolloutConfig
from paceline.rollout.sampler import GroupSampler
from paceline.rollout.saved import SavedSamples
from paceline.stats import RolloutStats
from paceline.tasks.order import ProblemOrder
from paceline.types import Group, Purpose, SamplingParams


class RolloutSource(ABC):
    """Where the loop gets a step's groups; `metrics` are the source's own, of the last `collect`.

    A source without requests outstanding between steps has nothing to suspend, save or restore.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.schedule: dict[str, Any] = {}  # line that repeats the last step (schedule.py)

    @abstractmethod
    def collect(self, step: int) -> list[Group]:
        """Returns the groups that step `step` learns from, in prompt order."""

    @abstractmethod
    def take_stats(self) -> RolloutStats:
        """Returns the backend's statistics since the last call."""

    def rewinder(self) -> Callable[[], None]:
        """Returns a function that rewinds the source to its current state, to rerun the step."""

        def rewind() -> None:
            self.take_stats()

        return rewind

    def suspend(self) -> None:  # noqa: B027
        """Takes all requests off the backend, to free it for other uses; the next step continues them."""

    def state(self) -> str:
        """Returns the groups under way, for a checkpoint; empty: there never are any."""
        return ""

    def restore(self, state: str) -> None:  # noqa: B027
        """Restores what `state` returned."""


class LiveRollouts(RolloutSource):
    """Samples every step's groups with the current policy, from the next problems in order."""

    def __init__(
        self, sampler: GroupSampler, order: ProblemOrder, prompts: int, samples: int, sampling: SamplingParams
    ) -> None:
        super().__init__()
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

    def rewinder(self) -> Callable[[], None]:
        position = self.order.position

        def rewind() -> None:
            self.order.position = position
            self.take_stats()

        return rewind


class SavedRollouts(RolloutSource):
    """Replays `paceline rollout --save`: step n learns from the n-th saved file, cycling through them."""

    def __init__(self, samples: SavedSamples) -> None:
        """Reads every file once, so that a bad one fails here and not in some step."""
        super().__init__()
        self.samples = samples
        self.files = samples.files
        for file in self.files:
            samples.read(file)

    def collect(self, step: int) -> list[Group]:
        return self.samples.read(self.files[(step - 1) % len(self.files)])

    def take_stats(self) -> RolloutStats:
        return RolloutStats()


def training_params(rollout: RolloutConfig) -> SamplingParams:
    return SamplingParams(temperature=rollout.temperature, max_tokens=rollout.max_tokens)
