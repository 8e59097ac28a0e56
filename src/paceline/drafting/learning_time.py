"""Whose time a head learns in: what it took, what of that others needed, and what it may still take.

    step of 8 s ──1%──▶ credit ──a slice's time is saved up first──▶ slices
    nobody needs it ──────────────────────────────────────────────▶ slices, which cost nothing

With `auto` learning pays for what others needed out of a share of the steps' time; the other ways to learn
are counted and not limited.
"""

from collections.abc import Callable

from paceline.config import OnlineDrafterConfig
from paceline.drafting.reach import Reach
from paceline.drafting.when import TimeBudget

# Time is saved up for so many slices: the first one of a step takes longer than those that follow, and what
# all of them come to is published once.
SAVED_SLICES = 3


class LearningTime:
    """Counts the time of learning, and limits it where the recipe does."""

    def __init__(self, config: OnlineDrafterConfig, warn: Callable[[str], None]) -> None:
        self.limited = config.when == "auto"
        self.budget = TimeBudget(config.budget)
        self.reach = Reach(config.budget, warn)
        self.saving = False  # this step's time for the next ones
        self.idle = 0.0  # seconds since the last step, while nobody needed them
        self.displaced = 0.0  # seconds that the step got longer by
        self._step_seconds = 0.0
        self._last_slice, self._last_is_first = 0.0, False
        self._set_up = 0.0  # owed, and no sign of what learning takes

    def begin(self, step_seconds: float) -> None:
        """Grants the share of a step that took so long."""
        self._step_seconds = step_seconds
        if self.limited:
            self.budget.grant(step_seconds)

    def charge(self, seconds: float, owed: bool = True) -> None:
        """Counts time that others needed; `owed`: the budget is to pay for it."""
        self.displaced += seconds
        if owed:
            self.budget.spend(seconds)

    def charge_set_up(self, seconds: float) -> None:
        """Counts what is done once: the budget pays for it, and learning waits, but is not given up."""
        self.charge(seconds)
        self._set_up += seconds

    def note_slice(self, seconds: float, idle: bool, through_head: bool) -> None:
        """Counts a slice; one that is not `through_head` makes states."""
        self._last_slice, self._last_is_first = seconds, self.reach.note(seconds, through_head)
        if idle:
            self.idle += seconds
        else:
            self._charge_slice()

    def outlasted(self) -> None:
        """Takes in that the last idle slice ended later than there was idle time."""
        self.idle -= self._last_slice
        self._charge_slice()

    def _charge_slice(self) -> None:
        # The first one of its kind sets libraries up: no debt that the next ones would have to wait for.
        self.charge(self._last_slice, owed=not self._last_is_first)

    @property
    def allows_slice(self) -> bool:
        """Whether there is time for a slice: what it takes is saved up first, not owed afterwards."""
        return not self.limited or (self.budget.credit > 0 and self.budget.credit >= self._price)

    def is_out_of_reach(self, slices: float) -> bool:
        """Returns whether so many slices take longer than their time can be saved up for."""
        granted = self.budget.share * self._step_seconds
        return self.limited and self.reach.is_out(slices, granted, -self.budget.credit - self._set_up)

    def look_ahead(self) -> None:
        """Decides whether the next step had better only save up, if it takes as long as this one."""
        most = self.budget.most(self._step_seconds)
        several = min(SAVED_SLICES * self.reach.median, most / 2)
        wanted = max(several, self._price)
        self.saving = self.limited and self.budget.after(self._step_seconds) < wanted

    @property
    def _price(self) -> float:
        """What a slice is expected to take; what nobody could save up for is tried all the same."""
        return min(self.reach.median, self.budget.most(self._step_seconds))

    def take_metrics(self) -> dict[str, float]:
        """Returns what learning took since the last call, and begins to count anew."""
        metrics = {"time/drafter_idle": self.idle, "time/drafter_displaced": self.displaced}
        self.idle = self.displaced = 0.0
        return metrics
