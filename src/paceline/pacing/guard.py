"""The guard: whether the drafter that runs has measured slower than plain decoding lately, whatever is
expected of it.
"""

from collections import deque
from dataclasses import dataclass

from paceline.pacing.cost import CostModel
from paceline.pacing.exploration import Situation, situation

GUARD_STEPS, GUARD_MARGIN = (
    64,
    0.02,
)  # slower than plain decoding by more than this over so many steps: it is left
ALARM_STEPS, ALARM_MARGIN = 16, 0.15  # the same, sooner, when it is bad


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps under one decision."""

    steps: int
    running: int
    context: float
    seconds: float
    plain_steps: float  # that plain decoding would have needed for the same tokens
    drafts: int
    accepted_at: tuple[int, ...]

    @property
    def situation(self) -> Situation:
        return situation(self.running, self.context)


class Guard:
    def __init__(self) -> None:
        self._recent: deque[Stretch] = deque()  # of the drafter that runs, since it was chosen

    def note(self, stretch: Stretch) -> None:
        self._recent.append(stretch)
        while sum(s.steps for s in self._recent) - self._recent[0].steps >= GUARD_STEPS:
            self._recent.popleft()

    def clear(self) -> None:
        self._recent.clear()

    def too_slow(self, cost: CostModel) -> list[Stretch]:
        """The last steps, if they were slower than plain decoding; else nothing."""
        for steps, margin in ((ALARM_STEPS, ALARM_MARGIN), (GUARD_STEPS, GUARD_MARGIN)):
            last = self._last(steps)
            if last and lost_seconds(last, cost) > margin * sum(s.seconds for s in last):
                return last
        return []

    def does_well(self, cost: CostModel, where: Situation) -> bool:
        """It has been no slower than plain decoding for long enough, all of it in this situation."""
        last = self._last(GUARD_STEPS)
        return bool(last) and all(s.situation == where for s in last) and lost_seconds(last, cost) <= 0

    def _last(self, steps: int) -> list[Stretch]:
        last: list[Stretch] = []
        for stretch in reversed(self._recent):
            last.append(stretch)
            if sum(s.steps for s in last) >= steps:
                return last
        return []


def lost_seconds(stretches: list[Stretch], cost: CostModel) -> float:
    """Against plain decoding; negative: won."""
    return sum(s.seconds - s.plain_steps * float(cost.verify(s.running, s.context)[0]) for s in stretches)
