"""How long a step takes: c(batch, queries, context) from times that were measured, and each drafter's own time.

A step's time is what its batch bucket and its queries per row cost, plus a part that grows with the cached tokens its rows
attend to. Times are kept in cells by (bucket, queries, context class):

    seconds(bucket, queries, load) = base(bucket, queries) + slope(queries) * load        load = rows * mean context

Where nothing was measured, `base` is interpolated over bucket * queries, since a matrix product does not care whose rows it
multiplies; verifying 4 tokens of 8 rows costs about what decoding 32 rows does. The whole is monotone in both.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

MEMORY_STEPS = 64  # a cell's estimate follows about this many steps
TRUSTED_STEPS, OUTLIER = 4, 1.25
SAME = 0.01  # times that differ by less are the same


def context_class(context: float) -> int:
    """0 below 512 tokens, then one for each doubling."""
    return max(0, int(context).bit_length() - 9)


@dataclass
class Cell:
    """A running estimate: the medians of blocks of steps, averaged with weights that forget."""

    seconds: float = 0.0
    load: float = 0.0
    steps: float = 0.0
    shown: float = 0.0  # the seconds that tables were last made for

    def note(self, seconds: float, load: float, steps: int) -> None:
        if self.steps and steps < TRUSTED_STEPS:
            seconds = min(seconds, OUTLIER * self.seconds)  # one slow step in so few is not outvoted by its median
        share = steps / (self.steps + steps)
        self.seconds += share * (seconds - self.seconds)
        self.load += share * (load - self.load)
        self.steps = min(MEMORY_STEPS, self.steps + steps)

    def has_moved(self) -> bool:
        """Since this was last asked and true; by enough to matter."""
        moved = abs(self.seconds - self.shown) > SAME * self.shown
        self.shown = self.seconds if moved else self.shown
        return moved


class CostModel:
    def __init__(self, buckets: Sequence[int], queries: Sequence[int]) -> None:
        self.buckets = list(buckets)
        self.queries = list(queries)  # ascending, the first is 1
        self._cells: dict[tuple[int, int], dict[int, Cell]] = {}  # by (bucket, queries), then context class
        self._drafts: dict[str, dict[tuple[int, int], Cell]] = {}  # by drafter, then (count, bucket)
        self._switches: dict[str, Cell] = {}
        self._tables: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # base and slopes by context class, until something is noted

    def bucket(self, running: int) -> int:
        return next((size for size in self.buckets if size >= running), self.buckets[-1])

    # -- what was seen --------------------------------------------------------------------------------------------

    def note_verify(self, running: int, queries: int, context: float, seconds: float, steps: int = 1) -> None:
        """`seconds`: the median over `steps` like steps. A measurement on rows without context counts as class 0's start."""
        cells = self._cells.setdefault((self.bucket(running), queries), {})
        key = context_class(context) if context else -1
        cell = cells.setdefault(key, Cell())
        cell.note(seconds, running * context, steps)
        if cell.has_moved():
            self._tables.clear()

    def note_draft(self, drafter: str, count: int, running: int, seconds: float, steps: int = 1) -> None:
        cells = self._drafts.setdefault(drafter, {})
        cells.setdefault((count, self.bucket(running)), Cell()).note(seconds, 0.0, steps)

    def note_switch(self, drafter: str, seconds: float) -> None:
        self._switches.setdefault(drafter, Cell()).note(max(0.0, seconds), 0.0, 8)

    # -- what is expected -----------------------------------------------------------------------------------------

    def knows(self, running: int, queries: int, context: float) -> bool:
        """Measured at this bucket, in this context class."""
        return context_class(context) in self._cells.get((self.bucket(running), queries), {})

    def verify(self, running: int, context: float) -> np.ndarray:
        """Seconds of a step for each entry of `queries`; zeros while nothing at all is known."""
        base, slopes = self._table(context_class(context))
        return base[self.buckets.index(self.bucket(running))] + slopes * (running * context)

    def draft(self, drafter: str, counts: Sequence[int], running: int, at_worst: bool = False) -> np.ndarray:
        """Seconds to propose each of `counts` tokens; zeros for a drafter that has never run.

        Beyond the longest proposal that has run, time goes on as it rose before that. From one point alone it may stay
        level, as for a drafter that copies, or at worst rise in proportion, as for one that runs once a token.
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

    def switch(self, drafter: str) -> float:
        cell = self._switches.get(drafter)
        return 0.0 if cell is None else cell.seconds

    def _table(self, wanted_class: int) -> tuple[np.ndarray, np.ndarray]:
        if wanted_class not in self._tables:
            slopes = self._slopes()
            self._tables[wanted_class] = monotone(self._filled(wanted_class, slopes)), slopes
        return self._tables[wanted_class]

    def _slopes(self) -> np.ndarray:
        """Seconds per attended token, by queries: the median of what cells of one bucket in different classes say."""
        found: dict[int, list[float]] = {}
        for (_, queries), cells in self._cells.items():
            loads = np.array([cell.load for cell in cells.values()])
            if len(cells) > 1 and loads.max() > 1.2 * loads.min():
                weights = np.array([cell.steps for cell in cells.values()])
                seconds = np.array([cell.seconds for cell in cells.values()])
                centred = loads - np.average(loads, weights=weights)
                found.setdefault(queries, []).append(float((weights * centred * seconds).sum() / (weights * centred**2).sum()))
        slopes = np.zeros(len(self.queries))
        if found:
            medians = {queries: max(0.0, float(np.median(values))) for queries, values in found.items()}
            for i, queries in enumerate(self.queries):
                slopes[i] = medians[min(medians, key=lambda q: (abs(q - queries), q))]
        return np.maximum.accumulate(slopes)

    def _filled(self, wanted_class: int, slopes: np.ndarray) -> np.ndarray:
        base = np.full((len(self.buckets), len(self.queries)), np.nan)
        for (bucket, queries), cells in self._cells.items():
            if bucket in self.buckets and queries in self.queries:
                cell = cells[min(cells, key=lambda c: (abs(c - wanted_class), c))]
                i, j = self.buckets.index(bucket), self.queries.index(queries)
                base[i, j] = max(cell.seconds - slopes[j] * cell.load, 0.05 * cell.seconds)
        known = ~np.isnan(base)
        if not known.any():
            return np.zeros_like(base)
        tokens = np.outer(self.buckets, self.queries).astype(float)
        base[~known] = _by_tokens(tokens[known], base[known], tokens[~known])
        return base

    # -- keeping it -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, list]:
        return {
            "steps": [[*key, c, asdict(cell)] for key, cells in self._cells.items() for c, cell in cells.items()],
            "drafts": [[name, *key, asdict(cell)] for name, cells in self._drafts.items() for key, cell in cells.items()],
            "switches": [[name, asdict(cell)] for name, cell in self._switches.items()],
        }

    def load_state(self, state: dict[str, list]) -> None:
        for bucket, queries, key, cell in state["steps"]:
            self._cells.setdefault((bucket, queries), {})[key] = Cell(**cell)
        for name, count, bucket, cell in state["drafts"]:
            self._drafts.setdefault(name, {})[count, bucket] = Cell(**cell)
        self._switches |= {name: Cell(**cell) for name, cell in state["switches"]}
        self._tables.clear()


def monotone(table: np.ndarray) -> np.ndarray:
    """The mean of the least monotone table above and the greatest below; a table that is monotone stays as it is."""
    above = np.maximum.accumulate(np.maximum.accumulate(table, axis=0), axis=1)
    below = np.minimum.accumulate(np.minimum.accumulate(table[::-1, ::-1], axis=0), axis=1)[::-1, ::-1]
    return (above + below) / 2


def _by_tokens(known: np.ndarray, seconds: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Interpolates between measured token counts; beyond them it goes on as it went between the two outermost."""
    tokens = np.unique(known)
    mean = np.array([seconds[known == t].mean() for t in tokens])
    mean = np.maximum.accumulate(mean)
    first, last = tokens[0], tokens[-1]
    rising = (mean[1] - mean[0]) / (tokens[1] - first) if len(tokens) > 1 else 0.0
    # A machine that is full takes time in proportion; whether it is full is not known, so a part of that at least.
    steep = max((mean[-1] - mean[-2]) / (last - tokens[-2]) if len(tokens) > 1 else 0.0, 0.25 * mean[-1] / last)
    below = np.maximum(mean[0] - rising * (first - wanted), 0.25 * mean[0])
    above = mean[-1] + steep * (wanted - last)
    return np.where(wanted < first, below, np.where(wanted > last, above, np.interp(wanted, tokens, mean)))
