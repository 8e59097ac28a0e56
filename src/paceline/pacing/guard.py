"""The guard: has the running drafter measured slower than plain decoding, whatever its expected rate?"""

from collections import deque
from collections.abc import Iterable

from paceline.pacing.blocks import BlockSummary
from paceline.pacing.cost import CostModel
from paceline.pacing.settings import DEFAULT_TUNING, PacingTuning
from paceline.pacing.situation import Situation


class Guard:
    """The last blocks of the running drafter, compared with the time of plain decoding."""

    def __init__(self, tuning: PacingTuning = DEFAULT_TUNING) -> None:
        self._tuning = tuning
        # Of the running drafter, since it was chosen.
        self._recent: deque[BlockSummary] = deque()

    def add(self, block: BlockSummary) -> None:
        """Records a block, and drops those that are no longer needed."""
        self._recent.append(block)
        while sum(b.steps for b in self._recent) - self._recent[0].steps >= self._tuning.guard_steps:
            self._recent.popleft()

    def clear(self) -> None:
        """Drops all blocks: another drafter runs."""
        self._recent.clear()

    def slow_blocks(self, cost: CostModel) -> list[BlockSummary]:
        """Returns the last blocks if they were slower than plain decoding, newest first; else none."""
        tuning = self._tuning
        for steps, margin in (
            (tuning.alarm_steps, tuning.alarm_margin),
            (tuning.guard_steps, tuning.guard_margin),
        ):
            last = self._last(steps)
            if last and lost_seconds(last, cost) > margin * sum(b.seconds for b in last):
                return last
        return []

    def is_doing_well(self, cost: CostModel, where: Situation) -> bool:
        """Returns whether the drafter was as fast as plain decoding for `guard_steps`, all in `where`."""
        last = self._last(self._tuning.guard_steps)
        return bool(last) and all(b.situation == where for b in last) and lost_seconds(last, cost) <= 0

    def _last(self, steps: int) -> list[BlockSummary]:
        """Returns the last blocks that make up `steps` steps, newest first; none if there are fewer steps."""
        last: list[BlockSummary] = []
        for block in reversed(self._recent):
            last.append(block)
            if sum(b.steps for b in last) >= steps:
                return last
        return []


def lost_seconds(blocks: Iterable[BlockSummary], cost: CostModel) -> float:
    """Returns the seconds lost against plain decoding; negative for a gain."""
    return sum(b.seconds - b.plain_steps * cost.plain_seconds(b.running, b.context) for b in blocks)
