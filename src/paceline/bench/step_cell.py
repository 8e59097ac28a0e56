"""One cell of `bench step`: a setting's steps, run once by the product's own `Trainer`.

A cell is a run directory (`report/run_directory.py`) with two more things in it: every sample of every step,
and `cell.json`, written last, which records where it ran and for how long. A cell without it is partial.

    python -m paceline.bench.step_cell RECIPE.yaml STARTED

runs a cell in this process, so that everything it held is released when the process ends. STARTED is when it
was launched, in seconds since the epoch.
"""

import importlib.metadata
import json
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from paceline.config import Config, ConfigError, changed_keys, load_config
from paceline.files import replace_file
from paceline.learning.sentinel import TrainingFailed
from paceline.loop import Trainer
from paceline.report.console import Console
from paceline.report.run_directory import RunDirectory
from paceline.session import Session

CELL_FILE = "cell.json"

# Keys that may differ between a cell and the requested recipe: the folder may have been moved.
PLACE_KEYS = ("run.root", "run.name")

# Metrics without which a step cannot be shown stage by stage.
REQUIRED_METRICS = (
    "time/step",
    "time/rollout",
    "time/prefill",
    "time/decode",
    "time/tail",
    "time/reward_wait",
    "time/learn",
    "time/sync",
)


@dataclass(frozen=True)
class Machine:
    """What figures depend on beside the recipe; cells are compared only where it is the same."""

    device: str
    device_type: str  # cpu or cuda
    dtype: str  # of the policy
    python: str
    torch: str
    triton: str  # empty: not installed
    paceline: str

    @classmethod
    def of(cls, session: Session) -> "Machine":
        return cls(
            device=session.device_name,
            device_type=session.device.type,
            dtype=str(session.policy.dtype).removeprefix("torch."),
            python=platform.python_version(),
            torch=torch.__version__,
            triton=_version("triton"),
            paceline=_version("paceline"),
        )


@dataclass(frozen=True)
class MeasuredCell:
    """A complete cell, as read from its folder."""

    folder: Path
    config: Config
    machine: Machine
    parameters: int  # of the policy
    seconds: float  # of its process, start-up included
    steps: tuple[dict[str, float], ...]  # metrics of each step, in order

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    def tokens(self, step: int) -> dict[str, tuple[int, ...]]:
        """Returns a step's response tokens by request id."""
        return read_tokens(_samples_file(self.folder, step))


def read_cell(folder: Path, wanted: Config) -> MeasuredCell | None:
    """Returns a cell that is complete; None where it must be run, or run again.

    Raises ConfigError where the folder holds a complete cell of another recipe.
    """
    try:
        record = json.loads((folder / CELL_FILE).read_text())
        machine = Machine(**record["machine"])
        parameters, seconds = int(record["parameters"]), float(record["seconds"])
        run = RunDirectory.open(folder)
        config = run.config()
        steps = [metrics for metrics in run.read_metrics() if metrics["kind"] == "train"]
        whole = len(steps) == config.run.steps and all(_is_whole(folder, metrics) for metrics in steps)
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged, JSON and UTF-8 included
        return None
    _refuse_other_recipe(folder, config, wanted)
    return MeasuredCell(folder, config, machine, parameters, seconds, tuple(steps)) if whole else None


def _is_whole(folder: Path, metrics: dict[str, float]) -> bool:
    samples = read_tokens(_samples_file(folder, int(metrics["step"])))
    return len(samples) == metrics["rollout/samples"] and all(key in metrics for key in REQUIRED_METRICS)


def _refuse_other_recipe(folder: Path, found: Config, wanted: Config) -> None:
    changed = {key: pair for key, pair in changed_keys(found, wanted).items() if key not in PLACE_KEYS}
    if changed:
        listing = "; ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in changed.items())
        raise ConfigError(
            f"{folder} holds a cell of another recipe ({listing}); choose another --out, or remove the folder"
        )


def read_tokens(file: Path) -> dict[str, tuple[int, ...]]:
    """Returns the response tokens of a samples file by request; raises ValueError where it is damaged."""
    tokens: dict[str, tuple[int, ...]] = {}
    for line in file.read_text().splitlines():
        for sample in json.loads(line)["samples"]:
            tokens[sample["request"]["id"]] = tuple(sample["tokens"])
    return tokens


def _samples_file(folder: Path, step: int) -> Path:
    return RunDirectory(folder).samples_path / f"step_{step:06d}.jsonl"


def run_cell(config: Config, recipe: str, started: float) -> None:
    """Runs a cell in this process; `started` is when it was launched, in seconds since the epoch."""
    trainer = Trainer(config, recipe, resume=None, replay=None, console=Console())
    trainer.run_steps()
    session = trainer.session
    record = {
        "machine": asdict(Machine.of(session)),
        "parameters": session.policy.config.num_parameters,
        "seconds": time.time() - started,
    }
    replace_file(trainer.directory.path / CELL_FILE, json.dumps(record, indent=2) + "\n")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main() -> None:
    """Runs the cell that the command line names; an error is printed as its last line."""
    recipe, started = sys.argv[1:]
    try:
        run_cell(load_config(recipe), recipe, float(started))
    except (ConfigError, OSError, ValueError, TrainingFailed) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
