"""When a head may learn: the time it took, how much of it delayed others, and what it may still take.

    step of 8 s ──1%──▶ credit ──what a step of learning takes is saved up first──▶ copies, slices
    waiting for rewards, as long as the last waits were ─────────────────────────▶ slices, which cost nothing

With `auto`, learning pays for the delay of others out of a share of the steps' time; the other ways to learn
are counted and not limited.
"""

import statistics
from collections import deque
from collections.abc import Callable

from paceline.config import OnlineDrafterConfig
from paceline.drafting.reach import Reach
from paceline.drafting.when import TimeBudget

# Time is saved up for so many slices: the first one of a step takes longer than those that follow, and what
# all of them come to is published once.
SAVED_SLICES = 3
# Newest steps whose times count, and newest waits, all of which were as long as is counted on.
STEPS, WAITS = 8, 4


class LearningTime:
    """Counts the time of learning, and limits it where the recipe does."""

    def __init__(self, config: OnlineDrafterConfig, warn: Callable[[str], None]) -> None:
        self.limited = config.when == "auto"
        self.budget = TimeBudget(config.budget)
        self.reach = Reach(config.budget, warn)
        self.saving = False  # this step's time for the next ones
        self.counts_on_idle = False  # this step has idle time, if it is like those before
        self.idle = 0.0  # idle seconds used since the last step
        self.displaced = 0.0  # seconds that the step got longer by
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._waits: deque[float] = deque(maxlen=WAITS)
        self._besides: deque[float] = deque(maxlen=STEPS)  # what steps of learning took besides slices
        self._besides_now = 0.0
        self._may_begin = True  # the first slice of a step that was saved up for
        self._last_slice, self._last_is_first = 0.0, False
        self._late = 0.0  # that idle slices took in all which ended too late
        self._apart = 0.0  # owed, and no sign of what learning takes

    # -- what it took -----------------------------------------------------------------------------

    def begin(self, step_seconds: float) -> None:
        """Grants the share of a step of `step_seconds`."""
        self._steps.append(step_seconds)
        if self.limited:
            self.budget.grant(step_seconds)
            if self.budget.credit >= 0:
                self._apart = 0.0

    def note_wait(self, seconds: float) -> None:
        """Records the reward wait of the step, its idle slices included."""
        self._waits.append(max(0.0, seconds - self._late))
        self._late = 0.0

    def charge(self, seconds: float, owed: bool = True) -> None:
        """Counts time that delayed others, besides slices; `owed`: the budget pays for it."""
        self._count(seconds, owed)
        if owed:
            self._besides_now += seconds

    def charge_apart(self, seconds: float) -> None:
        """Counts occasional work: the budget pays for it, but the next steps are not expected to need it."""
        self._count(seconds, owed=True)
        self._apart += seconds

    def note_slice(self, seconds: float, idle: bool, through_head: bool) -> None:
        """Counts a slice; one that is not `through_head` makes states."""
        self._last_slice, self._last_is_first = seconds, self.reach.note(seconds, through_head)
        if idle:
            self.idle += seconds
        else:
            self._charge_slice()

    def outlasted(self) -> None:
        """Called when the last idle slice ended after the idle time."""
        self.idle -= self._last_slice
        self._late += self._last_slice
        self._charge_slice()

    def _charge_slice(self) -> None:
        self._may_begin = False
        # The first one of its kind sets libraries up: no debt that the next ones would have to wait for.
        self._count(self._last_slice, owed=not self._last_is_first)

    def _count(self, seconds: float, owed: bool) -> None:
        self.displaced += seconds
        if owed:
            self.budget.spend(seconds)

    def take_metrics(self) -> dict[str, float]:
        """Returns what learning took since the last call, and resets the counters."""
        metrics = {"time/drafter_idle": self.idle, "time/drafter_displaced": self.displaced}
        self.idle = self.displaced = 0.0
        return metrics

    # -- what it may take -------------------------------------------------------------------------

    @property
    def allows_slice(self) -> bool:
        """Whether enough time has been saved up for a slice that others have to wait for.

        A step that was saved up for has one in any case, whatever came before it.
        """
        return not self.limited or self._may_begin or self._affords_slice

    @property
    def allows_idle_slice(self) -> bool:
        """Whether a slice may begin in idle time: it will end within it, or could be paid for."""
        return self._affords_slice or 0 < self.idle + self._price <= self._wait

    @property
    def learns_now(self) -> bool:
        """Whether there is time to learn in this step, or after it and before the next one's update."""
        return self.counts_on_idle or not self.saving

    def is_out_of_reach(self, slices: float) -> bool:
        """Returns whether an update of so many slices takes longer than their time can be saved up for."""
        given = self.budget.share * self._step + self._wait
        owed = -self.budget.credit - self._apart
        return self.limited and self.reach.is_out(slices, given, owed, self._beside)

    def look_ahead(self, used_states: bool) -> None:
        """Decides what the next step is for, if it is like those before; this one may have used states."""
        if used_states:
            self._besides.append(self._besides_now)
        self._besides_now = 0.0
        if not self.limited:
            return
        most = self.budget.most(self._step)
        several = min(SAVED_SLICES * self.reach.median, most / 2)
        after = self.budget.after(self._step)
        self.saving = after < min(most, self._beside + max(several, self._price))
        self.counts_on_idle = 0 < self._wait >= self._price and after >= self._beside
        self._may_begin = not self.saving

    @property
    def _affords_slice(self) -> bool:
        return self.budget.credit > 0 and self.budget.credit >= self._price

    @property
    def _price(self) -> float:
        """Expected seconds of a slice, capped at what can be saved up for: longer ones are still tried."""
        return min(self.reach.median, self.budget.most(self._step))

    @property
    def _step(self) -> float:
        return statistics.mean(self._steps) if self._steps else 0.0

    @property
    def _wait(self) -> float:
        """Seconds that a step waits for rewards at least."""
        return min(self._waits, default=0.0)

    @property
    def _beside(self) -> float:
        """Seconds that a step of learning takes besides slices."""
        return statistics.median(self._besides) if self._besides else 0.0
