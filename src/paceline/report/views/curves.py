"""From metrics to charts: one curve per run, or several metrics of each run in one chart."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.plots.align import aligned, averaged, thinned
from paceline.plots.chart import Axis, Chart, Mark, Series
from paceline.report.run_data import Columns, RunData

STEP = Axis("step")

# Share of the whole that a part needs to be drawn.
LEAST_SHARE = 0.002


@dataclass(frozen=True)
class Curves:
    """A chart of one or more metrics over the steps, with a band where a metric has an interval."""

    id: str
    title: str
    metrics: dict[str, str]  # what is drawn, with its name in the legend
    axis: Axis
    note: str = ""
    scale: float = 1.0  # what values are multiplied with: 100 for shares in percent
    evals: bool = False  # of evaluations instead of training steps
    hide_zero: bool = False  # leave out what was nothing but zero

    def chart(self, runs: Sequence[RunData], limit: int, marks: Sequence[Mark] = ()) -> Chart | None:
        """Returns the chart of all runs, or None where there is nothing to draw.

        With several runs a colour is a run and a dash a metric, with one run a colour is a metric.
        """
        several = len(runs) > 1
        shown = [name for name in self.metrics if any(self._shows(self._columns(run), name) for run in runs)]
        curves = []
        drawn = []
        for number, run in enumerate(runs):
            columns = self._columns(run)
            for place, name in enumerate(shown):
                if not columns.has(name):
                    continue
                xs, ys = thinned(columns.xs(), columns[name], limit)
                places = np.searchsorted(columns.xs(), xs)
                ends = columns.interval(name) if columns.has(f"{name}_margin") else ()
                band = [end[places] for end in ends]
                curves += [(xs, self.scale * column) for column in (ys, *band)]
                metric = self.metrics[name]
                of_run = f"{run.label}: {metric}" if len(shown) > 1 else run.label
                colour, dash = (number, place) if several else (place, 0)
                drawn.append((of_run if several else metric, bool(band), colour, dash))
        xs, values = aligned(curves)
        left = iter(values)
        series = []
        for label, has_band, colour, dash in drawn:
            y = next(left)
            low, high = (next(left), next(left)) if has_band else ((), ())
            series.append(Series(label, y, low, high, colour, dash, points=self.evals))
        if not series:
            return None
        return Chart(self.id, self.title, STEP, self.axis, xs, series, self.note, marks=tuple(marks))

    def _columns(self, run: RunData) -> Columns:
        return run.evals if self.evals else run.train

    def _shows(self, columns: Columns, name: str) -> bool:
        return columns.has(name) and not (self.hide_zero and not columns.known(name).any())


def stacked_chart(
    id: str, title: str, run: RunData, parts: dict[str, np.ndarray], axis: Axis, limit: int, note: str = ""
) -> Chart | None:
    """Returns parts of a whole over a run's steps, stacked, without those that are next to nothing."""
    sums = {name: float(np.nansum(column)) for name, column in parts.items()}
    present = {
        name: column for name, column in parts.items() if sums[name] > LEAST_SHARE * sum(sums.values())
    }
    if not present:
        return None
    xs, means = averaged(run.train.xs(), present, limit)
    colours = {name: number for number, name in enumerate(parts)}  # the same whatever is left out
    series = [Series(name, column, colour=colours[name]) for name, column in means.items()]
    return Chart(id, title, STEP, axis, xs, series, note, stacked=True)
