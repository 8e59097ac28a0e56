"""Situations: classes of batch size and context in which a drafter behaves alike.

A drafter that fails at 200 rows may win at one, and one that fails after ten tokens may win after a thousand.
Acceptance, waits and suspensions are therefore kept by situation.
"""

from typing import NamedTuple

from paceline.pacing.strategy import Moment


class Situation(NamedTuple):
    """A class of batch sizes and a class of contexts."""

    # 0 for one row, then 2-4, 5-16, 17-64, ... rows.
    batch_class: int
    # 0 below 512 tokens, then one class for each doubling.
    context_class: int


def context_class(context: float) -> int:
    """Returns 0 below 512 tokens, 1 below 1024, and so on by doublings."""
    return max(0, int(context).bit_length() - 9)


def batch_class(running: int) -> int:
    """Returns 0 for one row, 1 for 2-4, 2 for 5-16, and so on by factors of four."""
    return ((running - 1).bit_length() + 1) // 2


def situation_of(running: int, context: float) -> Situation:
    """Returns the situation of `running` rows whose mean length is `context` tokens."""
    return Situation(batch_class(running), context_class(context))


def is_new_rollout(before: Moment | None, now: Moment, factor: float) -> bool:
    """Returns whether another rollout has begun: within one, the batch shrinks and the context grows."""
    if before is None:
        return False
    if now.workload != before.workload:
        return True
    return now.running >= factor * before.running or factor * now.context <= before.context
