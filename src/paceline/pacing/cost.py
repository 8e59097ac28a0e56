"""How long a step takes: c(batch, queries, context) from times that were measured, and each drafter's own
time.

Times are kept in cells by (batch bucket, queries per row, context class). A machine works in tiles, so more
tokens need not take longer, and what was measured is believed as it is; only the part that grows with the
cached tokens is corrected:

    seconds(bucket, queries, load) = cell + slope * (load - the cell's load)        load = rows * mean context

Where nothing was measured, time follows a curve through what was, over bucket * queries, since a matrix
product does not care whose rows it multiplies: verifying 4 tokens of 8 rows costs about what decoding 32 rows
does. The curve is only a guess: who could win by its being wrong is measured (`adaptive.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

MEMORY_STEPS = 64  # a cell's estimate follows about this many steps
TRUSTED_STEPS, OUTLIER = 4, 1.25
OLD_STEPS = 1 << 14  # a time that was measured so long ago is worth measuring again


def context_class(context: float) -> int:
    """0 below 512 tokens, then one for each doubling."""
    return max(0, int(context).bit_length() - 9)


@dataclass
class Cell:
    """A running estimate: the medians of blocks of steps, averaged with weights that forget."""

    seconds: float = 0.0
    load: float = 0.0
    steps: float = 0.0
    noted_at: int = 0  # steps that all cells together had seen

    def note(self, seconds: float, load: float, steps: int) -> None:
        if self.steps and steps < TRUSTED_STEPS:
            seconds = min(
                seconds, OUTLIER * self.seconds
            )  # one slow step in so few is not outvoted by its median
        share = steps / (self.steps + steps)
        self.seconds += share * (seconds - self.seconds)
        self.load += share * (load - self.load)
        self.steps = min(MEMORY_STEPS, self.steps + steps)


class CostModel:
    def __init__(
        self, buckets: Sequence[int], queries: Sequence[int], catch_up: Mapping[str, float] | None = None
    ) -> None:
        """`catch_up`: by drafter, what catching up with a token takes of the policy's own work for it; others
        need not catch up.
        """
        self.buckets, self.catch_up = list(buckets), catch_up or {}
        self.queries = list(queries)  # ascending, the first is 1
        self._cells: dict[tuple[int, int], dict[int, Cell]] = {}  # by (bucket, queries), then context class
        self._drafts: dict[str, dict[tuple[int, int], Cell]] = {}  # by drafter, then (count, bucket)
        self._switches: dict[str, Cell] = {}
        self._steps = 0
        self._spread, self._tilt = 0.0, 0.0  # of load within cells, and of seconds with it
        # Until something is noted, what follows from the cells without load: by context class tokens and
        # seconds; by bucket and class seconds.
        self._curves: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._tables: dict[tuple[int, int], np.ndarray] = {}

    def bucket(self, running: int) -> int:
        return next((size for size in self.buckets if size >= running), self.buckets[-1])

    # -- what was seen --------------------------------------------------------------------------------------------

    def note_verify(self, running: int, queries: int, context: float, seconds: float, steps: int = 1) -> None:
        """`seconds`: the median over `steps` like steps."""
        cell, load = (
            self._cells.setdefault((self.bucket(running), queries), {}).setdefault(
                context_class(context), Cell()
            ),
            running * context,
        )
        if cell.steps:
            weight = steps * cell.steps / (steps + cell.steps)
            self._spread += weight * (load - cell.load) ** 2
            self._tilt += weight * (load - cell.load) * (min(seconds, OUTLIER * cell.seconds) - cell.seconds)
        cell.note(seconds, load, steps)
        self._steps += steps
        cell.noted_at = self._steps
        self._forget_tables()

    def note_draft(self, drafter: str, count: int, running: int, seconds: float, steps: int = 1) -> None:
        cells = self._drafts.setdefault(drafter, {})
        cells.setdefault((count, self.bucket(running)), Cell()).note(seconds, 0.0, steps)

    def note_switch(self, drafter: str, seconds: float) -> None:
        self._switches.setdefault(drafter, Cell()).note(max(0.0, seconds), 0.0, 8)

    # -- what is expected -----------------------------------------------------------------------------------------

    def knows(self, running: int, queries: int, context: float) -> bool:
        """Measured at this bucket and about this context, and not too long ago."""
        near, cells = context_class(context), self._cells.get((self.bucket(running), queries), {})
        return any(
            abs(c - near) <= 1 and self._steps - cell.noted_at < OLD_STEPS for c, cell in cells.items()
        )

    @property
    def slope(self) -> float:
        """Seconds per attended token, from how cells' times moved with their load."""
        return max(0.0, self._tilt / self._spread) if self._spread else 0.0

    def verify(self, running: int, context: float) -> np.ndarray:
        """Seconds of a step for each entry of `queries`; zeros while nothing at all is known."""
        if not self._cells:
            return np.zeros(len(self.queries))
        key = self.bucket(running), context_class(context)
        if key not in self._tables:
            self._tables[key] = self._table(*key)
        return self._tables[key] + self.slope * running * context

    def draft(self, drafter: str, counts: Sequence[int], running: int, at_worst: bool = False) -> np.ndarray:
        """Seconds to propose each of `counts` tokens; zeros for a drafter that has never run.

        Beyond the longest proposal that has run, time goes on as it rose before that. From one point alone it
        may stay level, as for a drafter that copies, or at worst rise in proportion, as for one that runs
        once a token.
        """
        cells = self._drafts.get(drafter)
        if not cells:
            return np.zeros(len(counts))
        bucket = self.bucket(running)
        known = sorted({count for count, _ in cells})
        seconds = []
        for count in known:
            nearest = min((b for c, b in cells if c == count), key=lambda b: (abs(np.log(b / bucket)), b))
            seconds.append(cells[count, nearest].seconds)
        seconds = np.maximum.accumulate(seconds)
        rising = seconds[-1] / known[-1] if at_worst else 0.0
        if len(known) > 1:
            rising = (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])
        wanted = np.asarray(counts, dtype=float)
        return np.interp(wanted, known, seconds) + rising * np.maximum(0.0, wanted - known[-1])

    def has_drafted(self, drafter: str) -> bool:
        return drafter in self._drafts

    def switch(self, drafter: str, running: int, context: float) -> float:
        """Seconds of catching up. Until it was measured, at worst: as if the drafter had to decode every
        cached token anew.
        """
        cell = self._switches.get(drafter)
        if cell is not None:
            return cell.seconds
        return self.catch_up.get(drafter, 0.0) * context * float(self.verify(running, context)[0])

    def _table(self, bucket: int, where: int) -> np.ndarray:
        """Seconds without load for each entry of `queries`: the curve's where nothing was measured."""
        if where not in self._curves:
            self._curves[where] = self._curve(where)
        queries = np.array(self.queries)
        guess = _along(*self._curves[where], bucket * queries)
        known = [i for i, q in enumerate(self.queries) if (bucket, q) in self._cells]
        if not known:
            return guess
        measured = np.array([self._base(bucket, self.queries[i], where) for i in known])
        missed = measured - guess[known]
        beside = np.abs(np.log(queries[:, None] / queries[known])).argmin(1)
        table = np.maximum(
            guess + missed[beside], 0.25 * guess
        )  # what the curve misses there it misses here, too
        table[known] = measured
        return table

    def _curve(self, where: int) -> tuple[np.ndarray, np.ndarray]:
        by_tokens: dict[int, list[float]] = {}
        for bucket, queries in self._cells:
            by_tokens.setdefault(bucket * queries, []).append(self._base(bucket, queries, where))
        tokens = sorted(by_tokens)
        return np.array(tokens, dtype=float), np.array(
            [sum(by_tokens[t]) / len(by_tokens[t]) for t in tokens]
        )

    def _base(self, bucket: int, queries: int, where: int) -> float:
        """Without what grows with the load, from the context class that is nearest."""
        cells = self._cells[bucket, queries]
        cell = cells.get(where) or cells[min(cells, key=lambda c: (abs(c - where), c))]
        return max(cell.seconds - self.slope * cell.load, 0.05 * cell.seconds)

    # -- keeping it -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, list]:
        return {
            "steps": [
                [*key, c, asdict(cell)] for key, cells in self._cells.items() for c, cell in cells.items()
            ],
            "drafts": [
                [name, *key, asdict(cell)]
                for name, cells in self._drafts.items()
                for key, cell in cells.items()
            ],
            "switches": [[name, asdict(cell)] for name, cell in self._switches.items()],
            "load": [self._steps, self._spread, self._tilt],
        }

    def load_state(self, state: dict[str, list]) -> None:
        for bucket, queries, where, cell in state["steps"]:
            if bucket in self.buckets and queries in self.queries:
                self._cells.setdefault((bucket, queries), {})[where] = Cell(**cell)
        for name, count, bucket, cell in state["drafts"]:
            self._drafts.setdefault(name, {})[count, bucket] = Cell(**cell)
        self._switches |= {name: Cell(**cell) for name, cell in state["switches"]}
        self._steps, self._spread, self._tilt = state["load"]
        self._forget_tables()

    def _forget_tables(self) -> None:
        self._curves.clear()
        self._tables.clear()


def _along(tokens: np.ndarray, seconds: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Interpolates between measured token counts; beyond them it goes on as it went between the two
    outermost.
    """
    first, last = tokens[0], tokens[-1]
    rising = max(0.0, (seconds[1] - seconds[0]) / (tokens[1] - first)) if len(tokens) > 1 else 0.0
    # A machine that is full takes time in proportion; whether it is full is not known, so a part of that at
    # least.
    steep = max(
        (seconds[-1] - seconds[-2]) / (last - tokens[-2]) if len(tokens) > 1 else 0.0,
        0.25 * seconds[-1] / last,
    )
    below = np.maximum(seconds[0] - rising * (first - wanted), 0.25 * seconds[0])
    above = seconds[-1] + steep * (wanted - last)
    return np.where(wanted < first, below, np.where(wanted > last, above, np.interp(wanted, tokens, seconds)))
