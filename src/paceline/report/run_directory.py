"""The folder of a run.

config.yaml       the recipe, every key spelt out
metrics.jsonl     one record per step and evaluation
trace.jsonl       the strategy of each decode step (pacing/trace.py)
requests/         when each request of the newest steps waited, ran and left (report/step_trace.py)
pacing.json       what the pacer has learnt about this machine (pacing/store.py)
samples/          groups of each step
closing.json      the closing comparison of plain and speculative decoding
report.html       the page that `paceline report` writes, renewed at every checkpoint
profile/          what --torch-profiler recorded
checkpoints/      see learning/checkpoint.py
"""

import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from paceline.config import Config, ConfigError, dump_config, load_config
from paceline.pacing.trace import cut_trace

logger = logging.getLogger(__name__)


# Numbers tried behind the name of a run directory that exists already.
MAX_SUFFIX = 1000


class RunDirectory:
    """A run's files: their paths, and reading and writing those that are text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.yaml"
        self.metrics_path = path / "metrics.jsonl"
        self.trace_path = path / "trace.jsonl"
        self.pacing_path = path / "pacing.json"
        self.samples_path = path / "samples"
        self.requests_path = path / "requests"
        self.closing_path = path / "closing.json"
        self.report_path = path / "report.html"
        self.profile_path = path / "profile"
        self.checkpoints_path = path / "checkpoints"

    @classmethod
    def create(cls, config: Config, recipe: str) -> "RunDirectory":
        """Makes a new folder; an existing one is never written into."""
        root = Path(config.run.root)
        if config.run.name:
            path = root / config.run.name
            if path.exists():
                raise ConfigError(
                    f"run.name = {config.run.name!r}: {path} exists. "
                    f"Continue it with --resume {path}, or choose another name"
                )
        else:
            stem = f"{Path(recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
            names = (stem, *(f"{stem}-{i}" for i in range(2, MAX_SUFFIX)))
            path = next(root / name for name in names if not (root / name).exists())
        run = cls(path)
        try:
            path.mkdir(parents=True)
            run.samples_path.mkdir()
            run.checkpoints_path.mkdir()
            run.write_config(config)
        except OSError as error:
            raise ConfigError(
                f"run.root = {config.run.root!r}: {error}; choose a folder that can be written to"
            ) from None
        return run

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Opens the folder of an earlier run; raises ConfigError where it is none."""
        run = cls(path)
        if not run.config_path.is_file():
            raise ConfigError(f"{path} is not a run directory: it holds no config.yaml")
        return run

    def config(self) -> Config:
        """Reads the run's recipe."""
        try:
            empty = not yaml.safe_load(self.config_path.read_bytes())
        except yaml.YAMLError:
            empty = False  # `load_config` says what is wrong with it
        if empty:  # it would pass for a recipe of nothing but defaults
            raise ConfigError(
                f"{self.config_path} is empty: the recipe of this run is lost. "
                "Write there the one it was started with, then go on"
            )
        return load_config(str(self.config_path))

    def write_config(self, config: Config) -> None:
        """Writes the run's recipe, unless it is there already."""
        text = dump_config(config)
        if not self.config_path.is_file() or self.config_path.read_text() != text:
            replace_file(self.config_path, text)

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Appends a record to `metrics.jsonl` and syncs it to disk."""
        with self.metrics_path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def write_closing(self, record: dict[str, Any]) -> None:
        """Writes what the closing check found."""
        replace_file(self.closing_path, json.dumps(record, indent=1) + "\n")

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yields the records of `metrics.jsonl`.

        A last line that a crash cut off is left out, and so are other damaged lines, with a warning.
        """
        if not self.metrics_path.is_file():
            return
        *lines, unfinished = self.metrics_path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            record = parse_record(line)
            if record is None:
                logger.warning(
                    "%s: line %d is damaged and left out; the records after it are kept",
                    self.metrics_path,
                    number,
                )
            else:
                yield record
        if (record := parse_record(unfinished)) is not None:
            yield record

    def cut_back(self, step: int) -> None:
        """Drops metrics, traces and samples of later steps, which a resumed run will make again."""
        cut_trace(self.trace_path, step)
        kept = [record for record in self.read_metrics() if record["step"] <= step]
        replace_file(self.metrics_path, "".join(json.dumps(record) + "\n" for record in kept))
        by_step = (*self.samples_path.glob("step_[0-9]*.jsonl"), *self.requests_path.glob("step_[0-9]*.json"))
        for file in by_step:
            if int(file.stem.removeprefix("step_")) > step:
                file.unlink()


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Parses a line of metrics; None where it is no record."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):  # also bytes that are no text
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("step"), int) and "kind" in record
    return record if is_record else None


def replace_file(path: Path, text: str) -> None:
    """Replaces a file so that it has its old content or the new one, whatever happens meanwhile."""
    beside = path.with_name(f"{path.name}.tmp")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
