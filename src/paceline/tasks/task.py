"""A task: its problems, their prompts, the rewards that score responses, and the tool of its turns."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from paceline.tasks.base import Demonstration, Done, Observation, Problem, Turn
from paceline.tasks.prompts import PromptEncoder
from paceline.tasks.rewards.functions import Failed
from paceline.tasks.rewards.pool import WorkerPool
from paceline.tasks.rewards.scoring import Scoring


@dataclass(frozen=True)
class Turns:
    """The tool of a multi-turn task, which runs in the pool's worker processes."""

    pool: WorkerPool
    index: int  # of the tool among the pool's targets
    stop: tuple[str, ...]  # texts that end a turn

    def step(self, problem: Problem, conversation: tuple[Turn, ...]) -> "Future[Observation | Done | Failed]":
        """Submits the policy's last turn to the tool; the future's result is its reply."""
        return self.pool.submit(self.index, (problem, conversation))


@dataclass(frozen=True)
class Task:
    """Everything that the recipe's `task` section describes, ready to sample from."""

    train: Sequence[Problem]
    held_out: Sequence[Problem]
    prompts: PromptEncoder
    scoring: Scoring
    turns: Turns | None = None
    demonstrations: Callable[[int, int], Iterator[Demonstration]] | None = None  # by count and seed

    def close(self) -> None:
        self.scoring.close()
