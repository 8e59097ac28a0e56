"""`report.html`: every view of one or more runs in a file that needs nothing else."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.files import replace_file
from paceline.pacing.trace import read_trace
from paceline.plots.page import standalone_page
from paceline.report.run_data import RunData, read_runs
from paceline.report.run_directory import RunDirectory
from paceline.report.views.charts import sections
from paceline.report.views.compare import comparison
from paceline.report.views.samples import report_samples, spread
from paceline.report.views.tail import tail_view
from paceline.report.views.verdicts import cards

# Points of a curve, and steps of a run whose tail and samples a report carries: what keeps it small.
MOST_POINTS = 1000
MOST_TAILS = 30
MOST_SAMPLE_STEPS = 60

# The recipe's keys on the line below a single run's name.
SETTINGS = {
    "policy.path": "policy",
    "task.name": "task",
    "learning.algorithm": "algorithm",
    "rollout.prompts_per_step": "prompts per step",
    "rollout.samples_per_prompt": "samples per prompt",
    "run.seed": "seed",
}


def write_report(paths: Sequence[Path], out: Path, step: int | None = None) -> None:
    """Writes the report of the runs in these directories; `step` is among the steps to look at."""
    replace_file(out, page_of(report_data(read_runs(paths), step)))


def renew_report(directory: RunDirectory, warn: Callable[[str], None]) -> None:
    """Writes the report of a live run; a failure is reported as a warning and does not end the run."""
    try:
        write_report([directory.path], directory.report_path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        warn(f"{directory.report_path} was not renewed: {error!r}")


def page_of(data: dict[str, Any]) -> str:
    lead = " ".join(f"{answer['question']} {answer['verdict']}." for answer in data["cards"])
    return standalone_page(data["title"], data, lead)


def report_data(runs: Sequence[RunData], step: int | None = None) -> dict[str, Any]:
    several = len(runs) > 1
    words, tables = comparison(runs) if several else ([], [])
    return {
        "title": " and ".join(run.label for run in runs[:3]) + (" and others" if len(runs) > 3 else ""),
        "subtitle": _subtitle(runs),
        "cards": [_of_run(run, card) if several else card for run in runs for card in cards(run)],
        "words": words,
        "tables": tables,
        "sections": sections(runs, MOST_POINTS),
        "tails": [_tails(run, step) for run in runs],
        "samples": [_samples(run) for run in runs],
    }


def _of_run(run: RunData, card: dict[str, Any]) -> dict[str, Any]:
    return card | {"question": f"{run.label}: {card['question'][:1].lower()}{card['question'][1:]}"}


def _subtitle(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs side by side; times are compared with the first, {runs[0].label}."
    run = runs[0]
    known = [f"{name} {run.settings[key]}" for key, name in SETTINGS.items() if key in run.settings]
    steps = f"{run.train.steps[-1] if len(run.train) else 0} of {run.settings.get('run.steps', '?')} steps"
    return ", ".join([steps, *known])[:600]


def _tails(run: RunData, step: int | None) -> dict[str, Any]:
    path = run.directory.trace_path
    steps = run.train.steps
    shown = sorted({*spread(steps, MOST_TAILS), *([] if step is None else [step])})
    rows = read_trace(path, shown)
    if step is not None and step not in rows:
        known = f"the run has steps {steps[0]} to {steps[-1]}" if steps else "the run has no step yet"
        raise ValueError(f"--step {step}: {path} holds nothing of it; {known}")
    views = {str(number): tail_view(rows[number]) for number in sorted(rows)}
    return {"run": run.name, "steps": sorted(rows), "views": views, "chosen": step}


def _samples(run: RunData) -> dict[str, Any]:
    steps, groups = report_samples(run.directory, MOST_SAMPLE_STEPS)
    return {"run": run.name, "steps": steps, "groups": groups}
