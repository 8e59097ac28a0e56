"""A task put together: problems, how they are asked, how responses are scored, and who answers in between."""

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
    """A tool in a worker process."""

    pool: WorkerPool
    index: int  # of the tool among the pool's targets
    stop: tuple[str, ...]  # texts that end a turn

    def step(self, problem: Problem, conversation: tuple[Turn, ...]) -> "Future[Observation | Done | Failed]":
        return self.pool.submit(self.index, (problem, conversation))


@dataclass(frozen=True)
class Task:
    train: Sequence[Problem]
    held_out: Sequence[Problem]
    prompts: PromptEncoder
    scoring: Scoring
    turns: Turns | None = None
    demonstrations: Callable[[int, int], Iterator[Demonstration]] | None = None  # by count and seed

    def close(self) -> None:
        self.scoring.close()
