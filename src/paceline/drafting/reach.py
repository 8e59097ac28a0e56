"""Whether an update of a head fits the time that it is granted, judged by the time of its slices."""

import statistics
from collections import deque
from collections.abc import Callable

from paceline.drafting.when import FAR, REACH

# Newest slices whose times count.
REMEMBERED = 8
# Slices after which the median of their times is trusted.
TRUSTED = 3


class Reach:
    """The time of slices through a head."""

    def __init__(self, budget: float, warn: Callable[[str], None]) -> None:
        """`budget` is the share of a step's time, for the warning that it is too small."""
        self.budget = budget
        self.warn = warn
        self.seconds: deque[float] = deque(maxlen=REMEMBERED)
        self._set_up: set[bool] = set()
        self._told = False

    def note(self, seconds: float, through_head: bool = True) -> bool:
        """Records a slice's time; returns whether it is the first of its kind, which sets libraries up.

        That one is no measure of those that follow. A slice that is not `through_head` makes states.
        """
        first = through_head not in self._set_up
        self._set_up.add(through_head)
        if through_head and not first:
            self.seconds.append(seconds)
        return first

    def is_out(self, slices: float, given: float, owed: float, beside: float) -> bool:
        """Returns whether so many slices take longer than REACH steps that give so many seconds each.

        What a step of learning takes `beside` them counts as well. The time of slices is known after a few,
        and after one where it is far too long; what earlier steps owe is known at once.
        """
        if owed > REACH * given:
            return True
        within = REACH if len(self.seconds) >= TRUSTED else FAR * REACH
        return beside + slices * self.median > within * given

    @property
    def median(self) -> float:
        """Seconds of a slice; 0 until one was measured."""
        return statistics.median(self.seconds) if self.seconds else 0.0

    def tell(self) -> None:
        """Warns once that the head does not learn."""
        if self._told:
            return
        self._told = True
        self.warn(
            "the eagle head does not learn: an update takes longer than its share of "
            f"{REACH} steps (rollout.speculation.online.budget = {self.budget:g}); raise it, lower "
            "rollout.speculation.online.batch, or use rollout.speculation.online.when=always"
        )
