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

# Records that a column has room for at first.
FIRST_ROOM = 64


# The column of the steps themselves.
STEP = "step"


class Columns:
    """Records of one kind as columns over their steps: appended to one by one, read as arrays."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._values: dict[str, np.ndarray] = {}  # longer than the steps: room to grow

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, record: dict[str, Any]) -> None:
        """Adds a record's numbers; a step that comes again takes the place of the earlier one."""
        step = record["step"]
        while self.steps and self.steps[-1] >= step:
            self._drop_last()
        place = len(self.steps)
        self.steps.append(step)
        for name, value in record.items():
            if not isinstance(value, int | float):
                continue
            column = self._values.get(name)
            if column is None or place >= len(column):
                column = self._grow(name, place + 1)
            column[place] = value

    def _drop_last(self) -> None:
        self.steps.pop()
        for column in self._values.values():
            column[len(self.steps) :] = np.nan

    def _grow(self, name: str, size: int) -> np.ndarray:
        grown = np.full(max(FIRST_ROOM, 2 * size), np.nan)
        known = self._values.get(name)
        if known is not None:
            grown[: len(known)] = known
        self._values[name] = grown
        return grown

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return sorted(self._values.keys() - {STEP})

    def xs(self) -> np.ndarray:
        """Returns the steps."""
        return self[STEP]

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns a column, NaN where a record does not have it."""
        count = len(self.steps)
        column = self._values.get(name)
        if column is None:
            return np.full(count, np.nan)
        return column[:count] if len(column) >= count else self._grow(name, count)[:count]

    def known(self, name: str) -> np.ndarray:
        """Returns the finite values of a column."""
        column = self[name]
        return column[np.isfinite(column)]

    def has(self, name: str) -> bool:
        """Whether the column has a finite value."""
        return name in self._values and bool(np.isfinite(self[name]).any())


@dataclass
class RunData:
    """One run: its name, its recipe, its metrics, and what its closing check said."""

    name: str
    directory: RunDirectory
    settings: dict[str, Any]  # dotted keys; empty where the recipe cannot be read
    train: Columns = field(default_factory=Columns)
    evals: Columns = field(default_factory=Columns)
    closing: dict[str, Any] | None = None  # record of a `SpeculationCheck`

    @classmethod
    def open(cls, path: Path, name: str = "") -> "RunData":
        """Opens a run without reading its metrics; raises ConfigError where `path` is no run directory."""
        directory = RunDirectory.open(path)
        run = cls(name or path.resolve().name, directory, _settings(directory.config_path))
        run.closing = _json_object(directory.closing_path)
        return run

    @classmethod
    def read(cls, path: Path, name: str = "") -> "RunData":
        """Opens a run and reads all its metrics."""
        run = cls.open(path, name)
        run.add(run.directory.read_metrics())
        return run

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Adds records of `metrics.jsonl`."""
        for record in records:
            if record["kind"] == "train":
                self.train.append(record)
            elif record["kind"] == "eval":
                self.evals.append(record)

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
