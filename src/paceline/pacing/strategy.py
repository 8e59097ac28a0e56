"""A pacer's input and output: strategies, the moment to choose for, the decision, and its observation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# More rows, or tokens per row, than any step has.
UNLIMITED = 1 << 30
# The mark of trees in a strategy's name.
TREE = "tree"
# The default workload of requests: training rollouts.
TRAIN = "train"


@dataclass(frozen=True)
class Strategy:
    """Which drafter proposes how many tokens per step; `PLAIN`, without a drafter, is one of them.

    `eagle:3` proposes three tokens for every row, `eagle:tree7` trees of seven nodes.
    """

    drafter: str = ""
    # Tokens per row.
    count: int = 0
    # Whether the tokens are the nodes of a tree; otherwise they are a chain.
    tree: bool = False

    def __str__(self) -> str:
        if not self.count:
            return "plain"
        return f"{self.drafter}:{TREE if self.tree else ''}{self.count}"

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        """Returns the strategy that `str` wrote as `text`; raises ValueError for any other text."""
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
        """Tokens per row in one step of the policy."""
        return self.count + 1


PLAIN = Strategy()


@dataclass(frozen=True, eq=False)
class Moment:
    """The batch of a step. The backend passes the same object as long as nothing has changed."""

    # Rows that run.
    running: int
    # Their mean length in tokens.
    context: float = 0.0
    # Most tokens per row in a step now, as limited by memory or capture.
    max_queries: int = UNLIMITED
    # The purpose of the rows. A drafter's acceptance in one workload predicts nothing of another: history has
    # the problems that are trained on and not those held out.
    workload: str = TRAIN


@dataclass(frozen=True, eq=False)
class Decision:
    """A strategy for some steps: until the moment changes class, or the pacer decides again."""

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
    """The outcome of one step. A backend that cannot time drafting alone reports it all as verifying."""

    decision: Decision
    running: int
    context: float
    draft_seconds: float
    verify_seconds: float
    # Emitted tokens, over all rows.
    tokens: int
    # Rows that ran the step. One for which the drafter proposed nothing, or less than asked for, is a draft
    # that ended early: acceptance is per step that was paid for, so that a strategy's expected rate is what
    # it emits.
    drafts: int = 0
    # Drafts whose token i was accepted. In a chain so were all before it; a tree's tokens are ordered by the
    # drafter's probability that they are reached. Either way a proposal of its first k tokens would have
    # gained the first k of these.
    accepted_at: tuple[int, ...] = ()
    # Whether the drafter had to catch up first.
    switched: bool = False
    # Whether its time includes something else (a prefill, a capture).
    disturbed: bool = False
    # Proposed tokens, over all drafts; fewer than asked for where the drafter had none.
    proposed: int = 0
    # Drafts of which anything was verified.
    begun: int = 0

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds


@dataclass(frozen=True)
class StepTime:
    """The seconds of a strategy's step with an empty cache, for a batch that fills its bucket."""

    running: int
    strategy: Strategy
    draft_seconds: float
    verify_seconds: float


class Pacer(Protocol):
    """Chooses a strategy for each step and learns from the outcomes."""

    def untimed(self) -> Sequence[Strategy]:
        """Returns the strategies to time before the first step; often none."""

    def take_times(self, times: Sequence[StepTime]) -> None:
        """Records times of steps that were measured before any request ran."""

    def choose(self, moment: Moment) -> Decision:
        """Begins the next step and returns its decision, nearly always the cached one of the step before."""

    def observe(self, observation: Observation) -> None:
        """Records the outcome of a step; called in the order of the steps, when the backend reads them."""

    def forget_times(self) -> None:
        """Drops all times, because the backend switches to another precision.

        Called when every launched step has been observed.
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
