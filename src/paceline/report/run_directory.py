"""The folder of a run.

config.yaml       the recipe, every key spelt out
run.lock          who writes to it now (runs/lock.py)
rewards.log       what reward functions and tools print
metrics.jsonl     one record per step and evaluation
trace.jsonl       the strategy of each decode step (pacing/trace.py)
requests/         when each request of the newest steps waited, ran and left (report/step_trace.py)
pacing.json       what the pacer has learnt about this machine (pacing/store.py)
schedule.jsonl    in modes other than sync: what each step took (rollout/schedule.py)
samples/          groups of each step
origin.json       of a run that learns from saved samples, or repeats a schedule: the option and its path
inputs.json       digests of the data and reward files that it learns from (runs/inputs.py)
evaluations.jsonl what `paceline eval` found of its policies
closing.json      the closing comparison of plain and speculative decoding
report.html       the page that `paceline report` writes, renewed at every checkpoint
profile/          what --torch-profiler recorded
checkpoints/      see learning/checkpoint.py
drafter/          the eagle head that learned, for vLLM and SGLang, with its card (drafting/run_drafter.py)
"""

import errno
import json
import logging
import math
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline.config import Config, ConfigError, dump_config, load_config
from paceline.files import replace_file
from paceline.pacing.trace import cut_trace

logger = logging.getLogger(__name__)


# Numbers tried behind the name of a run directory that exists already.
MAX_SUFFIX = 1000

# The first and the last line of `config.yaml`. Any beginning of a recipe is a recipe, too.
FIRST_LINE = "# The recipe of this run, every key spelt out; the last line shows that none is missing."
LAST_LINE = "# end of the recipe"

SAMPLES_FILE = re.compile(r"step_(\d+)\.jsonl", re.ASCII)
REQUESTS_FILE = re.compile(r"step_(\d+)\.json", re.ASCII)


@dataclass(frozen=True)
class Origin:
    """What a run follows instead of making its samples freely: an option of `train`, and its path."""

    option: str
    path: Path

    @classmethod
    def of(cls, replay: Path | None, schedule: Path | None) -> "Origin | None":
        """Returns the option that is given; both cannot be."""
        if replay is not None:
            return cls("--replay", replay)
        return cls("--schedule", schedule) if schedule is not None else None


class RunDirectory:
    """A run's files: their paths, and reading and writing those that are text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.yaml"
        self.metrics_path = path / "metrics.jsonl"
        self.trace_path = path / "trace.jsonl"
        self.pacing_path = path / "pacing.json"
        self.rewards_log_path = path / "rewards.log"
        self.schedule_path = path / "schedule.jsonl"
        self.samples_path = path / "samples"
        self.origin_path = path / "origin.json"
        self.inputs_path = path / "inputs.json"
        self.evaluations_path = path / "evaluations.jsonl"
        self.requests_path = path / "requests"
        self.closing_path = path / "closing.json"
        self.drafter_paths = path / "drafter", path / "drafter_training"  # of earlier versions, too
        self.report_path = path / "report.html"
        self.profile_path = path / "profile"
        self.checkpoints_path = path / "checkpoints"

    @classmethod
    def create(cls, config: Config, recipe: str, origin: Origin | None = None) -> "RunDirectory":
        """Makes a new folder; an existing one is never written into.

        `origin` is what the run follows; None: nothing, it makes its samples itself.
        """
        root = Path(config.run.root)
        stem = config.run.name or f"{Path(recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        names = (stem,) if config.run.name else (stem, *(f"{stem}-{i}" for i in range(2, MAX_SUFFIX)))
        try:
            for path in (root / name for name in names):
                if _make_whole(path, config, origin):
                    return cls(path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG and config.run.name:
                raise ConfigError(
                    f"run.name = {config.run.name!r}: {error.strerror}; choose a shorter one"
                ) from None
            raise ConfigError(
                f"run.root = {config.run.root!r}: {error}; choose a folder that can be written to"
            ) from None
        raise ConfigError(
            f"run.name = {config.run.name!r}: {path} exists. "
            f"Continue it with --resume {shlex.quote(str(path))}, or choose another name"
        )

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Opens the folder of an earlier run; raises ConfigError where it is none."""
        run = cls(path)
        if not run.config_path.is_file():
            way_out = f". {run._way_out()}" if run.checkpoints_path.is_dir() else ""
            raise ConfigError(f"{path} is not a run directory: it holds no config.yaml{way_out}")
        return run

    def config(self, overrides: Sequence[str] = ()) -> Config:
        """Reads the run's recipe and applies overrides; raises ConfigError where it is not whole."""
        content = self.config_path.read_bytes()
        text = content.decode(errors="replace").strip()
        cut_off = text.startswith(FIRST_LINE) and not text.endswith(LAST_LINE)
        try:
            empty = not yaml.safe_load(content)
        except (yaml.YAMLError, RecursionError):
            empty = False  # `load_config` raises with what is wrong
        if empty or cut_off:  # it would pass for a recipe with defaults
            what = "is empty" if empty else "was cut off"
            raise ConfigError(f"{self.config_path} {what}: the recipe of this run is lost. {self._way_out()}")
        try:
            recipe = load_config(str(self.config_path))
        except ConfigError as error:
            raise ConfigError(f"{error} {self._way_out()}") from None
        return load_config(str(self.config_path), list(overrides)) if overrides else recipe

    def command(self) -> str:
        """Returns the command that this run is of: `sft`, or else `train`."""
        try:
            learning = yaml.safe_load(self.config_path.read_bytes())["learning"]
            return "sft" if learning["algorithm"] == "sft" else "train"
        except (OSError, ValueError, TypeError, KeyError, RecursionError, yaml.YAMLError):
            return "train"

    def _way_out(self) -> str:
        """Returns how to get a lost recipe back; each checkpoint has a copy."""
        copies = sorted(self.checkpoints_path.glob("step_*/config.yaml"))
        if copies:
            return f"Restore it with: cp {shlex.quote(str(copies[-1]))} {shlex.quote(str(self.config_path))}"
        return "Write there the one it was started with, then continue"

    def write_config(self, config: Config) -> None:
        """Writes the run's recipe, unless it is there already."""
        text = recipe_text(config)
        if not self.config_path.is_file() or self.config_path.read_text() != text:
            replace_file(self.config_path, text)

    def origin(self) -> Origin | None:
        """Returns what this run follows; None: it makes its samples itself."""
        if not self.origin_path.exists():
            return None
        try:
            found = json.loads(self.origin_path.read_bytes())
            return Origin(str(found["option"]), Path(found["path"]))
        except (KeyError, TypeError, ValueError, RecursionError):  # damaged; that it has one is known still
            return Origin("--replay or --schedule", Path("PATH"))

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Appends a record to `metrics.jsonl` and syncs it to disk; what is not finite is null."""
        _append(self.metrics_path, record)

    def append_evaluation(self, record: dict[str, Any]) -> None:
        _append(self.evaluations_path, record)

    def write_closing(self, record: dict[str, Any]) -> None:
        replace_file(self.closing_path, json.dumps(record, indent=1) + "\n")

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yields the records of `metrics.jsonl`.

        A last line that a crash cut off is left out, and so are other damaged lines, with one warning.
        """
        if not self.metrics_path.is_file():
            return
        left_out: list[int] = []
        *lines, unfinished = self.metrics_path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            record = parse_record(line)
            if record is None:
                left_out.append(number)
            else:
                yield record
        if (record := parse_record(unfinished)) is not None:
            yield record
        if left_out:
            which = (
                f"line {left_out[0]}"
                if len(left_out) == 1
                else f"{len(left_out)} lines, first {left_out[0]},"
            )
            logger.warning("%s: %s damaged and left out; the others are kept", self.metrics_path, which)

    def cut_back(self, step: int, with_evaluation: bool = True) -> None:
        """Drops metrics, traces and samples of later steps, which a resumed run will rerun.

        Without `with_evaluation` the step's own evaluation goes, too.
        """
        cut_trace(self.trace_path, step)
        kept = [
            record
            for record in self.read_metrics()
            if record["step"] < step
            or (record["step"] == step and (with_evaluation or record["kind"] != "eval"))
        ]
        replace_file(self.metrics_path, "".join(map(_metrics_line, kept)))
        _remove_later(self.samples_path, SAMPLES_FILE, step)
        _remove_later(self.requests_path, REQUESTS_FILE, step)


def _remove_later(folder: Path, names: re.Pattern[str], step: int) -> None:
    """Removes the files of later steps; those with other names are kept, with one warning."""
    strangers = []
    for file in folder.glob("step_*"):
        name = names.fullmatch(file.name)
        if name is None or not file.is_file():
            strangers.append(file.name)
        elif int(name.group(1)) > step:
            file.unlink()
    if strangers:
        logger.warning(
            "%s: %d files with names of their own are left alone, such as %r",
            folder,
            len(strangers),
            min(strangers),
        )


def recipe_text(config: Config) -> str:
    return f"{FIRST_LINE}\n{dump_config(config)}{LAST_LINE}\n"


def _make_whole(path: Path, config: Config, origin: Origin | None) -> bool:
    """Makes a run directory that appears with its recipe or not at all; returns False if `path` exists."""
    if path.exists() or path.is_symlink():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".new-{secrets.token_hex(8)}")
    try:
        run = RunDirectory(beside)
        run.samples_path.mkdir(parents=True)
        run.checkpoints_path.mkdir()
        run.write_config(config)
        if origin is not None:
            kept = {"option": origin.option, "path": str(origin.path.absolute())}
            replace_file(run.origin_path, json.dumps(kept) + "\n")
        os.rename(beside, path)  # fails where another process was quicker: a directory that is not empty
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    return True


def enclosing_run(path: Path) -> Path | None:
    """Returns the run directory that a path is or lies in, links resolved; None where there is none."""
    where = Path(os.path.realpath(path))
    return next((folder for folder in (where, *where.parents) if _is_run(folder)), None)


def _is_run(folder: Path) -> bool:
    """Whether a folder holds what runs alone hold together; one whose recipe is lost still counts."""
    names = ("config.yaml", "run.lock", "metrics.jsonl")
    return sum((folder / name).is_file() for name in names) >= 2


def _append(path: Path, record: dict[str, Any]) -> None:
    """Appends a line to a JSONL file, and syncs it to disk; an OSError names the file."""
    try:
        with path.open("a") as file:
            file.write(_metrics_line(record))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _metrics_line(record: dict[str, Any]) -> str:
    """Returns a line of `metrics.jsonl`: JSON has no NaN and no infinity."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(finite) + "\n"


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Parses a line of metrics; None where it is no record.

    Runs of earlier versions wrote NaN and Infinity where there is null now; they are read as that.
    """
    try:
        record = json.loads(line.decode(), parse_constant=lambda _: None)
    except (ValueError, RecursionError):  # also bytes that are no text
        return None
    is_record = (
        isinstance(record, dict) and type(record.get("step")) is int and isinstance(record.get("kind"), str)
    )
    return record if is_record else None


def has_numbers(record: dict[str, Any], *keys: str) -> bool:
    """Returns whether a record has all of these metrics; other programs may have written into the file."""
    return all(type(record.get(key)) in (int, float) for key in keys)
