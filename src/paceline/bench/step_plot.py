"""The picture of `bench step`: a bar per setting, one colour per stage."""

from paceline.bench.step_figures import STAGES, StepFigures
from paceline.report.svg import Bar, stacked_bars


def plot_steps(figures: StepFigures, title: str) -> str:
    """Returns an SVG of the median seconds of each stage, with the whole step's ratio to plain's."""
    shown = [stage for stage in STAGES if any(f.stages[stage].high > 0 for f in figures.settings)]
    bars = []
    for setting in figures.settings:
        ratio = "" if setting.step_ratio is None else f"{setting.step_ratio.median:.2f}x"
        lengths = tuple(setting.stages[stage].median for stage in shown)
        bars.append(Bar(setting.setting.name, lengths, ratio))
    return stacked_bars(title, "seconds of a step, medians by stage", shown, bars)
