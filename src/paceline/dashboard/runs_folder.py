"""The runs in a folder, by name. Nothing outside it is opened, whatever links lie inside."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.config import ConfigError
from paceline.pacing.trace import parse_rows
from paceline.report.html_report import slowest_table
from paceline.report.live_run import LiveRun
from paceline.report.run_directory import RunDirectory
from paceline.report.step_lines import lines_of_step
from paceline.report.views.payload import payload
from paceline.report.views.samples import read_samples, spread
from paceline.report.views.tail import tail_view

# Points of a curve: a plot has few hundred pixels.
MOST_POINTS = 300

# Steps to choose from: so many over the whole run, and the newest.
STEPS_OVER_ALL = 200
NEWEST_STEPS = 50

# Runs that one view compares.
MOST_RUNS = 8


class UnknownRun(LookupError):
    """Raised for a name that is no run of the folder."""


class RunsFolder:
    """Finds runs, keeps those that were looked at, and makes their views."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        if not self.root.is_dir():
            raise ConfigError(
                f"{root} is not a folder; name the one that holds run directories, such as runs"
            )
        self.lock = threading.Lock()
        self.opened: dict[str, LiveRun] = {}

    def names(self) -> list[str]:
        """Returns the runs' names, the newest first; a run directory itself is a folder of one."""
        if (self.root / "config.yaml").is_file():
            return [self.root.name]
        found = [path for path in self.root.iterdir() if path.is_dir() and self._is_run(path)]
        return [path.name for path in sorted(found, key=_changed, reverse=True)]

    def listing(self) -> list[dict[str, Any]]:
        """Returns name and time of the last change of every run."""
        return [{"name": name, "changed": _changed(self._path(name))} for name in self.names()]

    def run(self, name: str) -> LiveRun:
        """Returns a run; raises UnknownRun where the folder has none of that name."""
        with self.lock:
            if name not in self.opened:
                if name not in self.names():
                    raise UnknownRun(name)
                self.opened[name] = LiveRun(self._path(name), name)
            return self.opened[name]

    def view(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns the views of some runs, with the steps that can be looked at one by one."""
        runs = [self.run(name) for name in names[:MOST_RUNS]]
        for run in runs:
            run.poll()
        data = [run.data for run in runs]
        record = payload(data, MOST_POINTS)
        for run_data in data:
            steps = run_data.train.steps
            chosen = sorted({*spread(steps, STEPS_OVER_ALL), *steps[-NEWEST_STEPS:]})
            record["tails"].append({"run": run_data.name, "steps": chosen})
            record["samples"].append({"run": run_data.name, "steps": chosen})
        return record

    def tail(self, name: str, step: int) -> dict[str, Any]:
        """Returns the long tail of one step."""
        directory = self.run(name).data.directory
        if not self._inside(directory.trace_path):
            return tail_view([])
        return tail_view(parse_rows(lines_of_step(directory.trace_path, step)))

    def samples(self, name: str, step: int) -> list[dict[str, Any]]:
        """Returns the sample responses of one step."""
        directory = self.run(name).data.directory
        if not self._inside(directory.samples_path / f"step_{step:06d}.jsonl"):
            return []
        return read_samples(directory, step)

    def slowest(self, name: str) -> dict[str, Any] | None:
        """Returns the slowest prompts of the newest steps."""
        directory = self.run(name).data.directory
        files = (
            list(directory.requests_path.glob("step_*.json")) if self._inside(directory.requests_path) else []
        )
        return slowest_table(directory) if files and all(map(self._inside, files)) else None

    def _path(self, name: str) -> Path:
        return self.root if (self.root / "config.yaml").is_file() else self.root / name

    def _is_run(self, path: Path) -> bool:
        """Whether it is a run directory whose files all lie inside the folder."""
        directory = RunDirectory(path)
        files = (directory.config_path, directory.metrics_path, directory.closing_path)
        return directory.config_path.is_file() and all(map(self._inside, (path, *files)))

    def _inside(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self.root)


def _changed(path: Path) -> float:
    metrics = path / "metrics.jsonl"
    try:
        return (metrics if metrics.is_file() else path).stat().st_mtime
    except OSError:
        return 0.0
