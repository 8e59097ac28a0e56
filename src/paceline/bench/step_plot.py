"""The picture of `bench step`: a bar per setting, one colour per stage."""

from paceline.bench.step_figures import STAGES, StepFigures
from paceline.plots.chart import Axis, Chart, Series
from paceline.plots.svg import to_svg


def plot_steps(figures: StepFigures, title: str) -> str:
    """Returns an SVG of the median seconds of each stage, with the whole step's ratio to plain's."""
    shown = [stage for stage in STAGES if any(f.stages[stage].high > 0 for f in figures.settings)]
    names = []
    for setting in figures.settings:
        ratio = "" if setting.step_ratio is None else f", {setting.step_ratio.median:.2f}x"
        names.append(f"{setting.setting.name}{ratio}")
    series = [
        Series(stage, [f.stages[stage].median for f in figures.settings], colour=number)
        for number, stage in enumerate(shown)
    ]
    axis = Axis("a step's stages, medians", "s")
    places = range(len(names))
    return to_svg(Chart("steps", title, Axis("setting"), axis, places, series, stacked=True, names=names))
