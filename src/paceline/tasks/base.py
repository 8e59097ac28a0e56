"""The data of tasks: problems, a policy's responses, and the turns of a longer conversation.

Plain data, light to import: reward functions in worker processes use these classes too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.types import Score

# A chat message for templates: role, content, and any further keys that a template uses.
Message = dict[str, Any]

# A score component named `failed/<reward>/<reason>` is 1 where that reward failed.
FAILED = "failed/"


@dataclass(frozen=True)
class Problem:
    """A prompt with the answer that verifiers compare responses with."""

    id: str
    prompt: str | tuple[Message, ...]
    answer: str
    extra: dict[str, Any] = field(default_factory=dict, hash=False)  # further columns, for rewards and tools
    source: str = field(default="", compare=False)  # file and line it was read from, for errors


@dataclass(frozen=True)
class Demonstration:
    """A problem and a response to learn from before RL."""

    problem: Problem
    response: str


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation, by the policy or by the tool."""

    text: str
    sampled: bool  # by the policy; False: an observation


@dataclass(frozen=True)
class Observation:
    """A tool's reply: literal text, or messages that the policy's chat template renders."""

    content: str | tuple[Message, ...]


@dataclass(frozen=True)
class Done:
    """A tool's reply that ends the conversation: the policy's last turn is its answer."""


@dataclass(frozen=True)
class Response:
    """A sample as a reward function sees it."""

    text: str  # the policy's last turn, without its end token
    truncated: bool  # it ended at its length limit
    conversation: tuple[Turn, ...] = ()


class ProblemSet(Protocol):
    """A source of problems, split into those to train on and those to evaluate on."""

    @property
    def train(self) -> Sequence[Problem]:
        """The problems to train on."""
        ...

    @property
    def held_out(self) -> Sequence[Problem]:
        """The problems to evaluate on."""
        ...


class ScoredProblemSet(ProblemSet, Protocol):
    """A problem set with its own verifier, fast and safe enough to run in the loop's thread."""

    def score(self, problem: Problem, response: str, truncated: bool) -> Score:
        """Scores a response, given without its end token; `truncated`: it ended at its length limit."""
        ...
