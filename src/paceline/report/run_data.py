"""What the views show of a run, read from its directory into columns.

Nothing here trusts the files: a value that is no number is missing, a recipe that cannot be read is empty,
and both are for looking at only.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from paceline.report.run_directory import RunDirectory

# Longest name of a run that a legend shows.
NAME_LENGTH = 60

# Numbers above are as good as none; JSON has integers that no float holds.
LARGEST = 1e300

# The column of the steps themselves.
STEP = "step"


class Columns:
    """Records of one kind as columns over their steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._records: list[dict[str, Any]] = []
        self._columns: dict[str, np.ndarray] = {}  # those that were read

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, record: dict[str, Any]) -> None:
        """Adds a record; a step that is rerun replaces the earlier one and everything after it."""
        while self.steps and self.steps[-1] >= record[STEP]:
            self.steps.pop()
            self._records.pop()
        self.steps.append(record[STEP])
        self._records.append(record)
        self._columns.clear()

    @property
    def names(self) -> list[str]:
        return sorted({name for record in self._records for name in record} - {STEP, "kind"})

    def xs(self) -> np.ndarray:
        return self[STEP]

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns a column, NaN where a record does not have a number there."""
        if name not in self._columns:
            values = (record.get(name) for record in self._records)
            known = [v if isinstance(v, int | float) and abs(v) < LARGEST else np.nan for v in values]
            self._columns[name] = np.array(known, dtype=float)
        return self._columns[name]

    def interval(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the low and high ends of a metric's interval: the value itself where it has none.

        Runs of earlier versions kept half its width alone.
        """
        margin = np.nan_to_num(self[f"{name}_margin"])
        low, high = self[f"{name}_low"], self[f"{name}_high"]
        return (
            np.where(np.isfinite(low), low, self[name] - margin),
            np.where(np.isfinite(high), high, self[name] + margin),
        )

    def known(self, name: str) -> np.ndarray:
        """Returns the finite values of a column."""
        column = self[name]
        return column[np.isfinite(column)]

    def has(self, name: str) -> bool:
        """Whether the column has a finite value."""
        return bool(np.isfinite(self[name]).any())


@dataclass
class RunData:
    """One run: its name, its recipe, its metrics, and the record of its closing check."""

    name: str
    directory: RunDirectory
    settings: dict[str, Any]  # dotted keys; empty where the recipe cannot be read
    train: Columns = field(default_factory=Columns)
    evals: Columns = field(default_factory=Columns)
    closing: dict[str, Any] | None = None  # record of a `SpeculationCheck`

    @classmethod
    def read(cls, path: Path, name: str = "") -> "RunData":
        """Reads a run; raises ConfigError where `path` is no run directory."""
        directory = RunDirectory.open(path)
        run = cls(name or path.resolve().name, directory, _settings(directory.config_path))
        run.closing = _json_object(directory.closing_path)
        run.add(directory.read_metrics())
        return run

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            if record["kind"] == "train":
                self.train.append(record)
            elif record["kind"] == "eval":
                self.evals.append(record)

    @property
    def graded(self) -> bool:
        """Whether rewards on held-out problems say more than right or wrong."""
        reward, accuracy = self.evals["eval/reward"], self.evals["eval/accuracy"]
        return bool(np.any(np.abs(reward - accuracy) > 1e-9))  # not where one of them is missing

    @property
    def label(self) -> str:
        """The run's name, cut where it is too long for a legend."""
        return self.name if len(self.name) <= NAME_LENGTH else f"{self.name[: NAME_LENGTH - 1]}…"


def read_runs(paths: Sequence[Path]) -> list[RunData]:
    """Reads runs under names that differ: those of their folders, numbered where two are the same."""
    seen: dict[str, int] = {}
    runs = []
    for path in paths:
        name = path.resolve().name
        seen[name] = seen.get(name, 0) + 1
        runs.append(RunData.read(path, name if seen[name] == 1 else f"{name} ({seen[name]})"))
    return runs


def _settings(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    return _flat(tree) if isinstance(tree, dict) else {}


def _flat(tree: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _json_object(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
