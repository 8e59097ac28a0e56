"""From metrics to charts: one curve per run, or several metrics of each run in one chart."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from paceline.plots.align import aligned, averaged, thinned
from paceline.plots.chart import Axis, Chart, Mark, Series
from paceline.report.run_data import Columns, RunData

STEP = Axis("step")

# Share of the whole that a part needs to be drawn.
LEAST_SHARE = 0.002

# Names in a legend that tell the metrics of one chart apart, by metric.
Labels = dict[str, str]


@dataclass(frozen=True)
class Curves:
    """A chart of one or more metrics over the steps."""

    id: str
    title: str
    metrics: Labels  # what is drawn, with its name in the legend
    axis: Axis
    note: str = ""
    scale: float = 1.0  # what values are multiplied with: 100 for shares in percent
    margins: Labels | None = None  # metrics that hold the half width of an interval, by metric
    evals: bool = False  # of evaluations instead of training steps
    hide_zero: bool = False  # leave it out where nothing but zeros was recorded
    points: bool = False

    def chart(self, runs: Sequence[RunData], limit: int, marks: Sequence[Mark] = ()) -> Chart | None:
        """Returns the chart of all runs, or None where there is nothing to draw.

        With several runs a colour is a run and a dash a metric, with one run a colour is a metric.
        """
        curves = []
        series = []
        metrics = [
            name for name in self.metrics if any(self._shows(self._columns(run), name) for run in runs)
        ]
        colours = count()
        for number, run in enumerate(runs):
            columns = self._columns(run)
            for dash, name in enumerate(metrics):
                if not columns.has(name):
                    continue
                colour = number if len(runs) > 1 else next(colours)
                label = self._label(run, name, len(runs), len(metrics))
                curve = Series(
                    label, (), colour=colour, dash=dash if len(runs) > 1 else 0, points=self.points
                )
                series.append((curve, bool(self.margins and self.margins.get(name))))
                curves += self._points(columns, name, limit)
        xs, ys = aligned(curves)
        drawn = []
        for curve, has_band in series:
            y = ys.pop(0)
            band = {"low": ys.pop(0), "high": ys.pop(0)} if has_band else {}
            drawn.append(Series(**{**curve.__dict__, "y": y, **band}))
        if not drawn:
            return None
        return Chart(self.id, self.title, STEP, self.axis, xs, drawn, self.note, marks=tuple(marks))

    def _columns(self, run: RunData) -> Columns:
        return run.evals if self.evals else run.train

    def _shows(self, columns: Columns, name: str) -> bool:
        return columns.has(name) and not (self.hide_zero and not columns.known(name).any())

    def _label(self, run: RunData, name: str, num_runs: int, num_metrics: int) -> str:
        metric = self.metrics[name]
        if num_runs == 1:
            return metric
        return f"{run.label}: {metric}" if num_metrics > 1 else run.label

    def _points(self, columns: Columns, name: str, limit: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the curve, and its band's edges at the same steps."""
        xs, ys = thinned(columns.xs(), columns[name], limit)
        ys = self.scale * ys
        curves = [(xs, ys)]
        margin = (self.margins or {}).get(name)
        if margin:
            width = self.scale * columns[margin][np.searchsorted(columns.xs(), xs)]
            curves += [(xs, ys - width), (xs, ys + width)]
        return curves


def stacked_chart(
    id: str, title: str, run: RunData, parts: dict[str, np.ndarray], axis: Axis, limit: int, note: str = ""
) -> Chart | None:
    """Returns parts of a whole over a run's steps, stacked, without those that are next to nothing."""
    sums = {name: float(np.nansum(column)) for name, column in parts.items()}
    whole = sum(sums.values())
    present = {name: column for name, column in parts.items() if sums[name] > LEAST_SHARE * whole}
    if not present:
        return None
    xs, means = averaged(run.train.xs(), present, limit)
    colours = {name: number for number, name in enumerate(parts)}  # the same whatever is left out
    series = [Series(name, column, colour=colours[name]) for name, column in means.items()]
    return Chart(id, title, STEP, axis, xs, series, note, stacked=True)
