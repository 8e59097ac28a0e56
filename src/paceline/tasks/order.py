"""The order in which a run visits its problems: every epoch a new shuffle, a pure function of seed and epoch.

The whole state is one number, the count of problems handed out, so a resumed run continues exactly where it
stopped.
"""

import random
from collections.abc import Sequence

from paceline.tasks.base import Problem


class ProblemOrder:
    """An endless, shuffled sequence of a task's problems; `position` counts those handed out."""

    def __init__(self, problems: Sequence[Problem], seed: int, position: int = 0) -> None:
        self.problems = problems
        self.seed = seed
        self.position = position
        self._shuffles: dict[int, list[int]] = {}

    @property
    def epoch(self) -> int:
        return self.position // len(self.problems)

    def take(self, count: int) -> list[Problem]:
        """Returns the next `count` problems and advances `position`."""
        taken = [self.problem_at(self.position + i) for i in range(count)]
        self.position += count
        return taken

    def problem_at(self, position: int) -> Problem:
        epoch, index = divmod(position, len(self.problems))
        if epoch not in self._shuffles:
            order = list(range(len(self.problems)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            # A step may cross the end of an epoch, so the previous shuffle is kept as well.
            self._shuffles = {e: o for e, o in self._shuffles.items() if e == epoch - 1} | {epoch: order}
        return self.problems[self._shuffles[epoch][index]]
