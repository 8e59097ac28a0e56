"""What tasks are made of: problems, what a policy answered, and the turns of a longer conversation.

Plain data, light to import: reward functions in worker processes see these classes too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.types import Score

Message = dict[str, Any]  # as chat templates take them: role, content, and whatever else a template knows
FAILED = "failed/"  # a score component `failed/<reward>/<reason>` is 1 where that reward failed


@dataclass(frozen=True)
class Problem:
    id: str
    prompt: str | tuple[Message, ...]
    answer: str
    extra: dict[str, Any] = field(default_factory=dict, hash=False)  # further columns, for rewards and tools


@dataclass(frozen=True)
class Demonstration:
    """A problem and a response to learn from before RL."""

    problem: Problem
    response: str


@dataclass(frozen=True)
class Turn:
    text: str
    sampled: bool  # by the policy; False: an observation


@dataclass(frozen=True)
class Observation:
    """Tokens that go on where the policy stopped: literal text, or messages rendered by the policy's chat
    template.
    """

    content: str | tuple[Message, ...]


@dataclass(frozen=True)
class Done:
    """The conversation is over; what the policy said last is its answer."""


@dataclass(frozen=True)
class Response:
    """What a reward sees. `text` is the last thing the policy said, without its end token; observations never
    count.
    """

    text: str
    truncated: bool  # it did not end by itself
    conversation: tuple[Turn, ...] = ()


class ProblemSet(Protocol):
    """Where problems come from."""

    train: Sequence[Problem]
    held_out: Sequence[Problem]


class ScoredProblemSet(ProblemSet, Protocol):
    """One with a verdict of its own, quick and safe enough to run in the loop's own thread."""

    def score(self, problem: Problem, response: str, truncated: bool) -> Score:
        """`response` is the text without its end token; a truncated one did not finish by itself."""
        ...


class DemonstratedProblemSet(ProblemSet, Protocol):
    """One that can show how its problems are solved, for `paceline warmup`."""

    def demonstrations(self, count: int, seed: int) -> Iterator[Demonstration]:
        """Yields `count` of them, for problems that are not held out; a pure function of its arguments."""
        ...
