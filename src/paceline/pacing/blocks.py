"""Blocks: consecutive steps that ran under one decision, and the figures that the pacer derives from them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from statistics import median_low

from paceline.pacing.situation import Situation, situation_of
from paceline.pacing.strategy import Observation, Strategy


@dataclass(frozen=True)
class BlockSummary:
    """A block of a drafter's steps, as the guard compares it with plain decoding."""

    steps: int
    running: int
    context: float
    seconds: float
    # Steps that plain decoding would have needed for the same tokens.
    plain_steps: float
    drafts: int
    accepted_at: tuple[int, ...]

    @property
    def situation(self) -> Situation:
        return situation_of(self.running, self.context)


@dataclass(frozen=True)
class Block:
    """Consecutive steps under one decision, in order; batch, context and situation are the first one's."""

    observations: tuple[Observation, ...]

    @property
    def strategy(self) -> Strategy:
        return self.observations[0].decision.strategy

    @property
    def workload(self) -> str:
        return self.observations[0].decision.workload

    @property
    def is_trial(self) -> bool:
        return self.observations[0].decision.reason == "trial"

    @property
    def steps(self) -> int:
        return len(self.observations)

    @property
    def running(self) -> int:
        return self.observations[0].running

    @property
    def context(self) -> float:
        return self.observations[0].context

    @cached_property
    def situation(self) -> Situation:
        return situation_of(self.running, self.context)

    @cached_property
    def clean(self) -> tuple[Observation, ...]:
        """Steps whose time is the strategy's alone: without catching up or disturbances."""
        return tuple(o for o in self.observations if not (o.switched or o.disturbed))

    @property
    def median_verify_seconds(self) -> float:
        """The policy's part of a clean step."""
        return median_low(o.verify_seconds for o in self.clean)

    @property
    def median_draft_seconds(self) -> float:
        """The drafter's part of a clean step."""
        return median_low(o.draft_seconds for o in self.clean)

    @property
    def switch_step_seconds(self) -> list[float]:
        """Seconds of the steps in which the drafter caught up, without disturbed ones."""
        return [o.seconds for o in self.observations if o.switched and not o.disturbed]

    @property
    def seconds(self) -> float:
        return sum(o.seconds for o in self.observations)

    @cached_property
    def drafts(self) -> int:
        return sum(o.drafts for o in self.observations)

    @cached_property
    def accepted_at(self) -> tuple[int, ...]:
        """Drafts whose first i + 1 tokens were accepted, over all steps."""
        columns = zip(*(o.accepted_at for o in self.observations), strict=True)
        return tuple(sum(column) for column in columns)

    def lost_seconds(self, baseline: float) -> float:
        """Returns the seconds lost against `baseline` tokens per second, never negative.

        Disturbed steps are left out: a capture is paid once, a prefill is no strategy's cost.
        """
        undisturbed = (o for o in self.observations if not o.disturbed)
        return max(0.0, sum(o.seconds - o.tokens / baseline for o in undisturbed))

    def summary(self) -> BlockSummary:
        """Returns the guard's view of this block, which must have clean steps."""
        steps = len(self.clean)
        rows = sum(o.running for o in self.clean)
        tokens = sum(o.tokens for o in self.clean)
        return BlockSummary(
            steps=steps,
            running=self.running,
            context=self.context,
            seconds=sum(o.seconds for o in self.clean),
            plain_steps=tokens / rows * steps,
            drafts=self.drafts,
            accepted_at=self.accepted_at,
        )


def split_into_blocks(observations: Iterable[Observation]) -> list[Block]:
    """Groups observations, in their order, by their decision."""
    groups = groupby(observations, key=lambda o: id(o.decision))
    return [Block(tuple(group)) for _, group in groups]
