"""Times of the policy's part of a step: seconds by (batch bucket, queries per row, context).

A query is a token of one row in one step of the policy; plain decoding has one, a proposal of k tokens has
k + 1. Times are kept by (bucket, queries) and context class. A machine works in tiles, so more tokens need
not take longer, and measured times are used as they are; only the part that grows with the cached tokens is
corrected:

    seconds(bucket, queries, load) = estimate + slope * (load - the estimate's load)
    load = rows * mean context

Where nothing was measured, time follows a curve through the measured points, over bucket * queries, since a
matrix product costs the same whatever requests its rows belong to: verifying 4 tokens of 8 rows costs about
as much as decoding 32 rows. The curve is only a guess; strategies that could win if it is wrong are timed
(`trials.py`).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from paceline.pacing.settings import DEFAULT_TUNING, PacingTuning
from paceline.pacing.situation import context_class
from paceline.pacing.time_estimate import TimeEstimate


@dataclass
class LoadSlope:
    """Seconds per attended token: a regression of each estimate's times on its load."""

    load_squared: float = 0.0
    load_times_seconds: float = 0.0

    def update(self, weight: float, load: float, seconds: float) -> None:
        """Adds a point, as differences of load and seconds from its estimate's average."""
        self.load_squared += weight * load**2
        self.load_times_seconds += weight * load * seconds

    @property
    def value(self) -> float:
        """Seconds per attended token, never negative; 0 while no load has varied."""
        return max(0.0, self.load_times_seconds / self.load_squared) if self.load_squared else 0.0


@dataclass(frozen=True, eq=False)
class TimeCurve:
    """Seconds over the tokens of a step, through the measured points."""

    tokens: np.ndarray
    seconds: np.ndarray

    def at(self, wanted: np.ndarray, tuning: PacingTuning) -> np.ndarray:
        """Interpolates; outside of the measured range, extrapolates from the two outermost points."""
        first, last = self.tokens[0], self.tokens[-1]
        shortest, longest = self.seconds[0], self.seconds[-1]
        slope_below = 0.0
        slope_above = 0.0
        if len(self.tokens) > 1:
            slope_below = max(0.0, (self.seconds[1] - shortest) / (self.tokens[1] - first))
            slope_above = (longest - self.seconds[-2]) / (last - self.tokens[-2])
        slope_above = max(slope_above, tuning.min_extrapolation_share * longest / last)
        below = np.maximum(shortest - slope_below * (first - wanted), tuning.min_guess_share * shortest)
        above = longest + slope_above * (wanted - last)
        between = np.interp(wanted, self.tokens, self.seconds)
        return np.where(wanted < first, below, np.where(wanted > last, above, between))


class VerifyTimes:
    """Seconds of the policy's part of a step, measured or guessed."""

    def __init__(
        self, buckets: Sequence[int], queries: Sequence[int], tuning: PacingTuning = DEFAULT_TUNING
    ) -> None:
        """`buckets`: the batch sizes that steps are padded to; `queries`: per row, from 1. Both ascending."""
        self.buckets = list(buckets)
        self.queries = list(queries)
        self._tuning = tuning
        # By (bucket, queries), then by context class.
        self._estimates: dict[tuple[int, int], dict[int, TimeEstimate]] = {}
        self._steps_seen = 0
        self._slope = LoadSlope()
        # Seconds without load, computed lazily from the estimates and dropped by updates: the curve by
        # context class, and a table over `queries` by bucket and context class.
        self._curves: dict[int, TimeCurve] = {}
        self._tables: dict[tuple[int, int], np.ndarray] = {}

    # -- Commands --------------------------------------------------------------------------------------------

    def update(self, running: int, queries: int, context: float, seconds: float, steps: int) -> None:
        """Records `seconds`, the median over `steps` steps of `running` rows."""
        estimates = self._estimates.setdefault((self.bucket(running), queries), {})
        estimate = estimates.setdefault(context_class(context), TimeEstimate())
        load = running * context
        if estimate.steps:
            weight = steps * estimate.steps / (steps + estimate.steps)
            clipped = min(seconds, self._tuning.outlier_factor * estimate.seconds)
            self._slope.update(weight, load - estimate.load, clipped - estimate.seconds)
        estimate.update(seconds, load, steps, self._tuning)
        self._steps_seen += steps
        estimate.updated_at = self._steps_seen
        self._drop_tables()

    def _drop_tables(self) -> None:
        self._curves.clear()
        self._tables.clear()

    # -- Queries ---------------------------------------------------------------------------------------------

    @property
    def knows_times(self) -> bool:
        return bool(self._estimates)

    def bucket(self, running: int) -> int:
        return next((size for size in self.buckets if size >= running), self.buckets[-1])

    def is_measured(self, running: int, queries: int, context: float) -> bool:
        """Returns whether this was measured at this bucket and about this context, and not too long ago."""
        near = context_class(context)
        estimates = self._estimates.get((self.bucket(running), queries), {})
        return any(
            abs(measured - near) <= 1 and self._steps_seen - estimate.updated_at < self._tuning.stale_steps
            for measured, estimate in estimates.items()
        )

    @property
    def slope(self) -> float:
        """Seconds per attended token."""
        return self._slope.value

    def seconds(self, running: int, context: float) -> np.ndarray:
        """Returns the seconds of a step for each entry of `queries`; zeros before any measurement."""
        if not self._estimates:
            return np.zeros(len(self.queries))
        return self._table(running, context) + self.slope * running * context

    def seconds_of(self, running: int, queries: int, context: float) -> float:
        if not self._estimates:
            return 0.0
        base = float(self._table(running, context)[self.queries.index(queries)])
        return base + self.slope * running * context

    def _table(self, running: int, context: float) -> np.ndarray:
        """Returns seconds without load for each entry of `queries`, recomputed only after an update."""
        key = self.bucket(running), context_class(context)
        if key not in self._tables:
            self._tables[key] = self._compute_table(*key)
        return self._tables[key]

    def _compute_table(self, bucket: int, where: int) -> np.ndarray:
        """Returns seconds without load for each entry of `queries`: measured, or else the curve's, corrected.

        The correction is the curve's error at the nearest measured entry.
        """
        if where not in self._curves:
            self._curves[where] = self._curve(where)
        queries = np.array(self.queries)
        guess = self._curves[where].at(bucket * queries, self._tuning)
        known = [i for i, q in enumerate(self.queries) if (bucket, q) in self._estimates]
        if not known:
            return guess
        slope = self.slope
        measured = np.array([self._base(bucket, self.queries[i], where, slope) for i in known])
        missed = measured - guess[known]
        nearest = np.abs(np.log(queries[:, None] / queries[known])).argmin(1)
        table = np.maximum(guess + missed[nearest], self._tuning.min_guess_share * guess)
        table[known] = measured
        return table

    def _curve(self, where: int) -> TimeCurve:
        slope = self.slope
        by_tokens: dict[int, list[float]] = {}
        for bucket, queries in self._estimates:
            by_tokens.setdefault(bucket * queries, []).append(self._base(bucket, queries, where, slope))
        tokens = sorted(by_tokens)
        seconds = [sum(by_tokens[t]) / len(by_tokens[t]) for t in tokens]
        return TimeCurve(np.array(tokens, dtype=float), np.array(seconds))

    def _base(self, bucket: int, queries: int, where: int, slope: float) -> float:
        """Returns seconds without the part that grows with the load, from the nearest context class."""
        estimates = self._estimates[bucket, queries]
        estimate = estimates.get(where) or estimates[min(estimates, key=lambda c: (abs(c - where), c))]
        return max(estimate.seconds - slope * estimate.load, self._tuning.min_base_share * estimate.seconds)

    # -- State -----------------------------------------------------------------------------------------------

    def state(self) -> dict:
        return {
            "estimates": [
                {"bucket": bucket, "queries": queries, "context_class": where, "time": asdict(estimate)}
                for (bucket, queries), estimates in self._estimates.items()
                for where, estimate in estimates.items()
            ],
            "slope": asdict(self._slope),
            "steps_seen": self._steps_seen,
        }

    def load_state(self, state: dict) -> None:
        """Restores what `state` returned, for buckets and queries that this run has."""
        for entry in state["estimates"]:
            bucket, queries = entry["bucket"], entry["queries"]
            if bucket in self.buckets and queries in self.queries:
                estimates = self._estimates.setdefault((bucket, queries), {})
                estimates[entry["context_class"]] = TimeEstimate(**entry["time"])
        self._slope = LoadSlope(**state["slope"])
        self._steps_seen = state["steps_seen"]
        self._drop_tables()
