"""What a pacer sees and says: strategies, the moment to choose for, the decision, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# More rows, or tokens per row, than any step has.
UNLIMITED = 1 << 30
# How a strategy's name says that it proposes trees.
TREE = "tree"
# The workload of requests that say nothing else: training rollouts.
TRAIN = "train"


@dataclass(frozen=True)
class Strategy:
    """Which drafter proposes how many tokens per step; `PLAIN`, without a drafter, is one of them.

    `eagle:3` proposes three tokens for every row, `eagle:tree7` trees of seven nodes.
    """

    drafter: str = ""
    # Tokens a row.
    count: int = 0
    # Whether the tokens are the nodes of a tree; otherwise they are a chain.
    tree: bool = False

    def __str__(self) -> str:
        if not self.count:
            return "plain"
        return f"{self.drafter}:{TREE if self.tree else ''}{self.count}"

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        """Returns the strategy that `str` wrote as `text`; raises ValueError where none is called that."""
        drafter, _, tokens = text.partition(":")
        if not tokens:
            return PLAIN
        if "~" in tokens:
            raise ValueError(
                f"strategy {text!r}: rows that share a step's tokens were removed, because they were slower; "
                f"use {text.partition('~')[0]}"
            )
        return cls(drafter, int(tokens.removeprefix(TREE)), tokens.startswith(TREE))

    @property
    def queries(self) -> int:
        """Tokens of one row that the policy looks at in one step."""
        return self.count + 1


PLAIN = Strategy()


@dataclass(frozen=True, eq=False)
class Moment:
    """What a step will run on. The backend hands in the same object as long as nothing has changed."""

    # Rows that run.
    running: int
    # Their mean length in tokens.
    context: float = 0.0
    # Tokens per row that a step may look at now, by memory or by what may be captured.
    max_queries: int = UNLIMITED
    # What the rows are for. How right a drafter is in one workload says nothing of another: history knows the
    # problems that are trained on and not those held out.
    workload: str = TRAIN


@dataclass(frozen=True, eq=False)
class Decision:
    """A strategy for some steps: until the moment changes class, or the pacer decides anew."""

    strategy: Strategy
    running: int = 0
    context: float = 0.0
    # Tokens per second; 0 without an expectation.
    expected: float = 0.0
    # "fixed", or of the adaptive pacer "best", "trial" or "guard".
    reason: str = "fixed"
    # The moment's.
    workload: str = TRAIN


@dataclass(frozen=True)
class Observation:
    """What one step did. A backend that cannot tell drafting from verifying calls it all verifying."""

    decision: Decision
    running: int
    context: float
    draft_seconds: float
    verify_seconds: float
    # Emitted tokens, over all rows.
    tokens: int
    # Rows that took the step. One for which the drafter had nothing, or less than asked for, is a draft that
    # went no further: acceptance is per step that was paid for, so that what a strategy promises is what it
    # emits.
    drafts: int = 0
    # Drafts whose token i was accepted. In a chain so were all before it; a tree's tokens are numbered by how
    # likely the drafter took them to be reached. Either way a proposal of its first k tokens would have
    # gained the first k of these.
    accepted_at: tuple[int, ...] = ()
    # Whether the drafter had to catch up first.
    switched: bool = False
    # Whether something else (a prefill, a capture) is in its time.
    disturbed: bool = False
    # Proposed tokens, over all drafts; fewer than asked for where the drafter had nothing to say.
    proposed: int = 0
    # Drafts of which anything was verified.
    begun: int = 0

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds


@dataclass(frozen=True)
class StepTime:
    """What a strategy's step took while nothing was cached, of a batch that fills its bucket."""

    running: int
    strategy: Strategy
    draft_seconds: float
    verify_seconds: float


class Pacer(Protocol):
    """Chooses a strategy for each step and learns from what came of it."""

    def untimed(self) -> Sequence[Strategy]:
        """Returns the strategies that it would like to have timed before the first step; often none."""

    def take_times(self, times: Sequence[StepTime]) -> None:
        """Takes in what steps took before any request ran."""

    def choose(self, moment: Moment) -> Decision:
        """Begins the next step and returns its decision, nearly always the cached one of the step before."""

    def observe(self, observation: Observation) -> None:
        """Takes in what a step did: in the order of the steps, as late as the backend reads them."""

    def forget_times(self) -> None:
        """Forgets all times, because the backend computes in another precision from here on.

        Everything launched has been observed before.
        """


class FixedPacer:
    """A pacer with one strategy while few rows run, and plain decoding above.

    Verification is nearly free only while the machine has capacity left.
    """

    def __init__(self, strategy: Strategy, max_running: int = UNLIMITED) -> None:
        self.strategy = strategy
        self.max_running = max_running
        self._moment: Moment | None = None
        self._decision = Decision(PLAIN)

    def untimed(self) -> Sequence[Strategy]:
        return ()

    def take_times(self, times: Sequence[StepTime]) -> None:
        pass

    def choose(self, moment: Moment) -> Decision:
        if moment is not self._moment:
            strategy = self.strategy
            fits = moment.running <= self.max_running and strategy.queries <= moment.max_queries
            strategy = strategy if fits and strategy.count else PLAIN
            self._moment = moment
            self._decision = Decision(strategy, moment.running, moment.context)
        return self._decision

    def observe(self, observation: Observation) -> None:
        pass

    def forget_times(self) -> None:
        pass
