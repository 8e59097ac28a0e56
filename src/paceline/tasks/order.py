"""In which order a run visits its problems: every epoch a new shuffle, a pure function of seed and epoch.

The whole state is one number, the count of problems handed out, so a resumed run continues exactly where it
stopped.
"""

import random
from collections.abc import Sequence

from paceline.tasks.base import Problem


class ProblemOrder:
    def __init__(self, problems: Sequence[Problem], seed: int, position: int = 0) -> None:
        self.problems = problems
        self.seed = seed
        self.position = position
        self._shuffles: dict[int, list[int]] = {}

    @property
    def epoch(self) -> int:
        return self.position // len(self.problems)

    def take(self, count: int) -> list[Problem]:
        taken = [self._problem_at(self.position + i) for i in range(count)]
        self.position += count
        return taken

    def _problem_at(self, position: int) -> Problem:
        epoch, index = divmod(position, len(self.problems))
        if epoch not in self._shuffles:
            order = list(range(len(self.problems)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._shuffles = (
                {epoch: order}
                if epoch - 1 not in self._shuffles
                else {epoch - 1: self._shuffles[epoch - 1], epoch: order}
            )
        return self.problems[self._shuffles[epoch][index]]
