"""What a pacer sees and says: strategies, the moment to choose for, the decision, and what came of it."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Strategy:
    """Which drafter proposes how many tokens per step. `PLAIN` is one of them."""

    drafter: str = ""
    count: int = 0

    def __str__(self) -> str:
        return f"{self.drafter}:{self.count}" if self.count else "plain"

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        drafter, _, count = text.partition(":")
        return cls(drafter, int(count)) if count else PLAIN

    @property
    def queries(self) -> int:
        """Tokens of one row that the policy looks at in one step."""
        return self.count + 1


PLAIN = Strategy()


@dataclass(frozen=True, eq=False)
class Moment:
    """What a step will run on. The backend hands in the same object as long as nothing has changed."""

    running: int  # rows
    context: float = 0.0  # their mean length
    max_queries: int = (
        1 << 30
    )  # tokens per row that a step may look at now, by memory or by what may be captured


@dataclass(frozen=True, eq=False)
class Decision:
    """Stands for some steps: until the moment changes class, or the pacer looks again."""

    strategy: Strategy
    running: int = 0
    context: float = 0.0
    expected: float = 0.0  # tokens per second; 0: no expectation
    reason: str = "fixed"


@dataclass(frozen=True)
class Observation:
    """What one step did. A backend that cannot tell drafting from verifying calls it all verifying."""

    decision: Decision
    running: int
    context: float
    draft_seconds: float
    verify_seconds: float
    tokens: int  # emitted, over all rows
    # Rows that took the step. One for which the drafter had nothing, or less than asked for, is a draft that
    # went no further: acceptance is per step that was paid for, so that what a strategy promises is what it
    # emits.
    drafts: int = 0
    accepted_at: tuple[int, ...] = ()  # drafts whose first i + 1 tokens were all accepted
    switched: bool = False  # the drafter had to catch up first
    disturbed: bool = False  # something else (a prefill, a capture) is in its time
    proposed: int = 0  # tokens, over all drafts; fewer than asked for where the drafter had nothing to say

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds


class Pacer(Protocol):
    def choose(self, moment: Moment) -> Decision:
        """For the next step. Called for every step, so nearly always a cached answer."""

    def observe(self, observation: Observation) -> None:
        """In the order of the steps, as late as the backend reads them."""

    def forget_times(self) -> None:
        """Steps take another time from here on: the backend computes in another precision. Everything
        launched has been observed.
        """


class FixedPacer:
    """One strategy while few rows run, plain decoding above: verification is free only while the machine has
    room.
    """

    def __init__(self, strategy: Strategy, max_running: int = 1 << 30) -> None:
        self.strategy = strategy
        self.max_running = max_running
        self._moment: Moment | None = None
        self._decision = Decision(PLAIN)

    def choose(self, moment: Moment) -> Decision:
        if moment is not self._moment:
            fits = moment.running <= self.max_running and self.strategy.queries <= moment.max_queries
            self._moment, self._decision = (
                moment,
                Decision(self.strategy if fits else PLAIN, moment.running, moment.context),
            )
        return self._decision

    def observe(self, observation: Observation) -> None:
        pass

    def forget_times(self) -> None:
        pass
