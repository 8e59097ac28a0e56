"""A drafter's record: its acceptance, what its trials have cost, and when it may be tried again.

A drafter that fails backs off: the wait until its next trial doubles with each failure in that situation. One
that the guard stopped is suspended as well: it is not chosen there until its wait is over.
"""

import random
from dataclasses import dataclass

from paceline.pacing.acceptance import AcceptanceModel
from paceline.pacing.settings import DEFAULT_TUNING, PacingTuning
from paceline.pacing.situation import Situation


@dataclass
class Backoff:
    """When one drafter may run again; all in steps."""

    # The wait after the next failure.
    wait: int
    next_trial: int = 0
    suspended_until: int = 0


class DrafterRecord:
    """The acceptance, losses and waits of one drafter."""

    def __init__(self, max_count: int, rng: random.Random, tuning: PacingTuning = DEFAULT_TUNING) -> None:
        """`max_count`: the most tokens that the drafter proposes; `rng`: for the waits' jitter."""
        self.acceptance = AcceptanceModel(max_count, tuning)
        # Seconds lost to its trials and to its strategies that the guard stopped.
        self.lost = 0.0
        self._rng = rng
        self._tuning = tuning
        self._by_situation: dict[Situation, Backoff] = {}
        # After a failure in one situation a drafter waits in the others, too, but not as long.
        self._elsewhere = self._new_backoff()

    # -- Queries ---------------------------------------------------------------------------------------------

    def is_suspended(self, where: Situation, step: int) -> bool:
        """Returns whether the guard has stopped the drafter here and its wait is not over."""
        backoff = self._by_situation.get(where)
        return backoff is not None and step < backoff.suspended_until

    def is_due(self, where: Situation, step: int) -> bool:
        """Returns whether the drafter may be tried here; where it never ran, it is due at once."""
        earliest = self._elsewhere.next_trial if self.acceptance.has_seen(where) else 0
        backoff = self._by_situation.get(where)
        if backoff is not None:
            earliest = max(earliest, backoff.next_trial, backoff.suspended_until)
        return step >= earliest

    # -- Commands --------------------------------------------------------------------------------------------

    def back_off(self, where: Situation, step: int) -> None:
        """Postpones the next trial, here and elsewhere, after a failure at `step`."""
        self._put_off(self._backoff_in(where), step, self._tuning.max_wait_steps)
        self._put_off(self._elsewhere, step, self._tuning.max_wait_elsewhere_steps)

    def suspend(self, where: Situation, step: int) -> None:
        """Backs off, and keeps the drafter from being chosen here until the wait is over."""
        self.back_off(where, step)
        backoff = self._backoff_in(where)
        backoff.suspended_until = backoff.next_trial

    def reset_backoff(self, where: Situation, step: int) -> None:
        """Resets waits to the shortest, since the drafter does well here at `step`."""
        for backoff in (self._backoff_in(where), self._elsewhere):
            backoff.wait = self._tuning.first_wait_steps
            backoff.next_trial = step + self._tuning.first_wait_steps

    def begin_rollout(self) -> None:
        """Makes the drafter due again in every situation, except where the guard has suspended it.

        Prompts and weights have changed, and a drafter with history may know the prompts by now, so earlier
        failures predict little.
        """
        for backoff in (*self._by_situation.values(), self._elsewhere):
            backoff.wait = self._tuning.first_wait_steps
            backoff.next_trial = backoff.suspended_until

    def _put_off(self, backoff: Backoff, step: int, max_wait: int) -> None:
        jitter = self._tuning.wait_jitter
        backoff.next_trial = step + int(backoff.wait * self._rng.uniform(1.0 - jitter, 1.0 + jitter))
        backoff.wait = min(max_wait, 2 * backoff.wait)

    def _backoff_in(self, where: Situation) -> Backoff:
        return self._by_situation.setdefault(where, self._new_backoff())

    def _new_backoff(self) -> Backoff:
        return Backoff(self._tuning.first_wait_steps)
