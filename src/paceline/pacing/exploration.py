"""What may be tried, and when: short trials paid from a fixed share of the time, each drafter's failures waited out.

A trial runs a drafter for a few steps to see what it gains. Its worst case (nothing accepted) must fit what is left of the
share, so a drafter that is never right costs no more than that, however often it is tried and however dear it is. A shorter
kind only measures how long a strategy takes, from a share of its own.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.pacing.acceptance import AcceptanceModel
from paceline.pacing.strategy import Strategy

FIRST_WAIT = 64  # steps
LONGEST_WAIT = 4096
LONGEST_DELAY = 64  # steps after which an outcome that has not come is not waited for
HEAD_START = 2.0  # plain steps' worth of time that each may lose before any has been earned
OLD_NEWS = 0.1  # weight that earlier counts keep when a drafter is tried again


@dataclass
class Trial:
    """`length` steps of a strategy; then the incumbent goes on until they have been seen."""

    strategy: Strategy
    baseline: float  # tokens per second that the incumbent would have made
    length: int
    started: int  # step
    record: "DrafterRecord | None" = None  # of the drafter that is being tried; None: only the strategy's time is asked for
    seen: int = 0

    def running(self, step: int) -> bool:
        return step < self.started + self.length

    def over(self, step: int) -> bool:
        return self.seen >= self.length or step >= self.started + self.length + LONGEST_DELAY


class DrafterRecord:
    """What is known of one drafter, what finding it out has cost, and how patient to be with it."""

    def __init__(self, max_count: int) -> None:
        self.acceptance = AcceptanceModel(max_count)
        self.lost = 0.0  # seconds, to its trials and to strategies of its that turned out slower than plain decoding
        self.next_trial = 0
        self.barred_until = 0  # the guard's word
        self.wait = FIRST_WAIT
        self.seen_classes: set[int] = set()  # context classes in which it has run

    def note(self, where: int, drafts: int, accepted_at: Sequence[int], steps: int) -> None:
        self.acceptance.note(where, drafts, accepted_at, steps)
        self.seen_classes.add(where)

    def due(self, step: int, where: int) -> bool:
        return step >= self.barred_until and (step >= self.next_trial or where not in self.seen_classes)

    def failed(self, step: int, rng: random.Random) -> None:
        self.next_trial = step + int(self.wait * rng.uniform(0.75, 1.25))  # drafters must not be tried in lockstep
        self.wait = min(LONGEST_WAIT, 2 * self.wait)

    def succeeded(self, step: int) -> None:
        self.wait = FIRST_WAIT
        self.next_trial = step + FIRST_WAIT
