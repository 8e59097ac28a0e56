"""`report.html`: every view of one or more runs in a file that needs nothing else."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.files import replace_file
from paceline.pacing.trace import parse_rows
from paceline.plots.document import SCRIPTS, Section
from paceline.plots.page import standalone_page
from paceline.report.live_run import LiveRun
from paceline.report.run_data import RunData, read_runs
from paceline.report.run_directory import RunDirectory
from paceline.report.step_lines import lines_of_step
from paceline.report.step_trace import read_step_trace, traced_steps
from paceline.report.views.payload import payload
from paceline.report.views.samples import report_samples, slowest_prompts, spread
from paceline.report.views.tail import tail_view

# Points of a curve, and steps of a run whose tail and samples a report carries: what keeps it small.
MOST_POINTS = 1000
MOST_TAILS = 30
MOST_SAMPLE_STEPS = 60

# Steps whose requests are looked through for the slowest prompts.
SLOWEST_OF = 20


def write_report(paths: Sequence[Path], out: Path, step: int | None = None) -> None:
    """Writes the report of the runs in these directories; `step` is among the steps to look at."""
    replace_file(out, render_report(read_runs(paths), step))


class OwnReport:
    """The report of a run that goes on: it reads what is new of the metrics, not all of them every time."""

    def __init__(self, directory: RunDirectory, warn: Callable[[str], None]) -> None:
        self.directory = directory
        self.warn = warn
        self.run: LiveRun | None = None

    def renew(self) -> None:
        """Writes the report again; a problem is told and is not the run's."""
        try:
            if self.run is None:
                self.run = LiveRun(self.directory.path, self.directory.path.resolve().name)
            self.run.poll()
            replace_file(self.directory.report_path, render_report([self.run.data]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            self.warn(f"{self.directory.report_path} was not renewed: {error!r}")


def render_report(runs: Sequence[RunData], step: int | None = None) -> str:
    """Returns the report as HTML."""
    data = payload(runs, MOST_POINTS)
    data["tails"] = [_tails(run, step) for run in runs]
    data["samples"] = [_samples(run) for run in runs]
    for run in runs:
        slowest = slowest_table(run.directory)
        if slowest is not None:
            if len(runs) > 1:
                slowest |= {"id": f"slowest-{run.name}", "title": f"Slowest prompts: {run.label}"}
            _time_section(data)["tables"].append(slowest)
    lead = " ".join(f"{answer['question']} {answer['verdict']}." for answer in data["cards"])
    return standalone_page(data["title"], data, SCRIPTS, lead)


def slowest_table(directory: RunDirectory) -> dict[str, Any] | None:
    """Returns the slowest prompts of the newest steps whose requests are recorded."""
    folder = directory.requests_path
    read = [read_step_trace(folder, step) for step in traced_steps(folder)[-SLOWEST_OF:]]
    return slowest_prompts([trace for trace in read if trace is not None])


def _tails(run: RunData, step: int | None) -> dict[str, Any]:
    path = run.directory.trace_path
    shown = spread(run.train.steps, MOST_TAILS) if path.is_file() else []
    if step is not None:
        shown = sorted({*shown, step})
    rows = {number: parse_rows(lines_of_step(path, number)) for number in shown}
    if step is not None and not rows[step]:
        steps = run.train.steps
        known = f"the run has steps {steps[0]} to {steps[-1]}" if steps else "the run has no step yet"
        raise ValueError(f"--step {step}: {path} holds nothing of it; {known}")
    shown = [number for number in shown if rows[number]]
    views = {str(number): tail_view(rows[number]) for number in shown}
    return {"run": run.name, "steps": shown, "views": views, "chosen": step}


def _samples(run: RunData) -> dict[str, Any]:
    steps, groups = report_samples(run.directory, MOST_SAMPLE_STEPS)
    return {"run": run.name, "steps": steps, "groups": groups}


def _time_section(data: dict[str, Any]) -> dict[str, Any]:
    for section in data["sections"]:
        if section["id"] == "time":
            return section
    data["sections"].append(Section("time", "Where does the time go?", "Time").record())
    return data["sections"][-1]
