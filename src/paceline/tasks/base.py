"""What a task is: problems to train on, problems held out, and a score for each response."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.types import Score


@dataclass(frozen=True)
class Problem:
    id: str
    prompt: str
    answer: str


class Task(Protocol):
    train: Sequence[Problem]
    held_out: Sequence[Problem]

    def score(self, problem: Problem, response: str, truncated: bool) -> Score:
        """`response` is the text without its end token; a truncated one did not finish by itself."""
        ...
