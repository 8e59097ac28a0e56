"""What may be tried, where and when: short trials paid from one budget, each drafter's failures waited out
where they happened.

A trial runs a drafter for a few steps to see what it gains. Its worst case (nothing accepted, and the
drafter's catching up) must fit what is left of the budget, which all drafters share, so drafters that are
never right cost no more than that, however many they are, however often they are tried and however dear they
are. Only what nobody could know is not counted before: the first trial of a drafter whose costs were never
measured. It is paid from the budget afterwards, before anybody is tried again. A shorter kind of trial only
measures how long a strategy takes, from a budget of its own.
"""

import random
from collections import defaultdict
from dataclasses import dataclass

from paceline.pacing.acceptance import AcceptanceModel, Situation
from paceline.pacing.cost import context_class
from paceline.pacing.strategy import Moment, Strategy

FIRST_WAIT = 64  # steps
LONGEST_WAIT = 4096
LONGEST_WAIT_ELSEWHERE = 512  # in situations other than the one where it failed
LONGEST_DELAY = 64  # steps after which an outcome that has not come is not waited for
LONGEST_TRIAL = 16  # steps
HEAD_START = 2.0  # plain steps' worth of time that a budget has before any has been earned
OLD_NEWS = 0.1  # weight that earlier counts keep when a drafter is tried again


def situation(running: int, context: float) -> Situation:
    """What failed at 200 rows may win at one, and what failed after ten tokens after a thousand. Batches by
    fours: 1, 2-4, 5-16, 17-64, ...
    """
    return ((running - 1).bit_length() + 1) // 2, context_class(context)


def begins_anew(before: Moment | None, now: Moment) -> bool:
    """A rollout's batch shrinks and its context grows; twice the batch or half the context is another
    one's.
    """
    return before is not None and (now.running >= 2 * before.running or 2 * now.context <= before.context)


class Budget:
    """Time that finding out may lose: a share of all that has passed, in seconds."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.lost = 0.0

    def affords(self, elapsed: float, at_once: float, per_step: float, plain_step: float) -> int:
        """Steps of a trial that loses so much at once and in each of them."""
        left = max(self.share * elapsed, HEAD_START * plain_step) - self.lost - at_once
        return int(min(LONGEST_TRIAL, left / max(per_step, plain_step / LONGEST_TRIAL))) if left > 0 else 0


@dataclass
class Standing:
    """How patient to be with one drafter in one situation."""

    next_trial: int = 0
    barred_until: int = 0  # the guard's word
    wait: int = FIRST_WAIT


class DrafterRecord:
    """What is known of one drafter, what finding it out has cost, and how patient to be with it."""

    def __init__(self, max_count: int) -> None:
        self.acceptance = AcceptanceModel(max_count)
        self.lost = (
            0.0  # seconds, to its trials and to strategies of its that turned out slower than plain decoding
        )
        self._standings: defaultdict[Situation, Standing] = defaultdict(Standing)
        self._elsewhere = (
            Standing()
        )  # having failed in one situation it waits in the others, too, but not as long

    def barred(self, where: Situation, step: int) -> bool:
        return step < self._standings[where].barred_until

    def due(self, where: Situation, step: int) -> bool:
        """At once in a situation in which it has never run."""
        standing, elsewhere = self._standings[where], 0
        if self.acceptance.knows(where):
            elsewhere = self._elsewhere.next_trial
        return step >= max(standing.next_trial, standing.barred_until, elsewhere)

    def failed(self, where: Situation, step: int, rng: random.Random) -> None:
        for standing, longest in (
            (self._standings[where], LONGEST_WAIT),
            (self._elsewhere, LONGEST_WAIT_ELSEWHERE),
        ):
            standing.next_trial = step + int(
                standing.wait * rng.uniform(0.75, 1.25)
            )  # drafters must not be tried in lockstep
            standing.wait = min(longest, 2 * standing.wait)

    def bar(self, where: Situation, step: int, rng: random.Random) -> None:
        self.failed(where, step, rng)
        self._standings[where].barred_until = self._standings[where].next_trial

    def does_well(self, where: Situation, step: int) -> None:
        for standing in (self._standings[where], self._elsewhere):
            standing.wait, standing.next_trial = FIRST_WAIT, step + FIRST_WAIT

    def begin_rollout(self) -> None:
        """Other prompts, other weights, and for a drafter that remembers maybe prompts it knows by now: what
        it failed at before says little. It is due as soon as the budget allows; the guard's word stands.
        """
        for standing in (*self._standings.values(), self._elsewhere):
            standing.wait, standing.next_trial = FIRST_WAIT, standing.barred_until


@dataclass
class Trial:
    """`length` steps of a strategy; then the incumbent goes on until they have been seen."""

    strategy: Strategy
    baseline: float  # tokens per second that the incumbent would have made
    length: int
    started: int  # step
    record: DrafterRecord | None = (
        None  # of the drafter that is being tried; None: only the strategy's time is asked for
    )
    where: Situation = (0, 0)
    seen: int = 0

    def running(self, step: int) -> bool:
        return step < self.started + self.length

    def over(self, step: int) -> bool:
        return self.seen >= self.length or step >= self.started + self.length + LONGEST_DELAY
