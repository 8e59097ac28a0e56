"""`bench step`: RL steps under several settings on the same seeds and problems, in pieces if need be.

    cell = (setting, repeat)         FOLDER/paced/repeat_2/       a run directory, see step_cell.py
    one process per cell             FOLDER/paced/repeat_2.log    what it printed

A cell that is complete is read and not run again, so the same command continues where it was stopped. Repeats
have the same seeds: their spread is the machine's, the spread over steps is the workload's.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.bench.step_cell import MeasuredCell, read_cell
from paceline.bench.step_settings import Setting, cell_config, refuse_reserved
from paceline.config import Config, ConfigError, dump_config

# Lines of a failed cell's log that its error quotes.
QUOTED_LINES = 5


@dataclass(frozen=True)
class Cell:
    """One setting's steps, to be run once."""

    setting: Setting
    repeat: int  # from 1
    config: Config
    folder: Path

    @property
    def name(self) -> str:
        """The cell's label, also its path below the bench's folder."""
        return f"{self.setting.name}/{self.folder.name}"

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")


def plan_cells(
    recipe: str, overrides: Sequence[str], settings: Sequence[Setting], steps: int, repeats: int, out: Path
) -> list[Cell]:
    """Returns all cells, each setting's first repeat before any second one."""
    refuse_reserved(overrides)
    cells = []
    for repeat in range(1, repeats + 1):
        for setting in settings:
            name = f"repeat_{repeat}"
            config = cell_config(recipe, overrides, setting, steps, out / setting.name, name)
            cells.append(Cell(setting, repeat, config, out / setting.name / name))
    return cells


def read_cells(cells: Sequence[Cell]) -> dict[str, MeasuredCell]:
    """Returns the cells that are complete, by name; raises where they come from different machines."""
    found = {cell.name: measured for cell in cells if (measured := read_cell(cell.folder, cell.config))}
    _refuse_mixed_machines(found)
    return found


def measure_cells(
    cells: Sequence[Cell],
    budget: float | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, MeasuredCell]:
    """Runs what is missing within `budget` seconds; returns all complete cells.

    A cell starts only if the time of earlier ones says that it will end within the budget; the first one of
    all starts in any case.
    """
    start = time.perf_counter()
    measured = read_cells(cells)
    for cell in cells:
        if cell.name in measured:
            continue
        expected = _expected_seconds(cell, measured)
        left = None if budget is None else budget - (time.perf_counter() - start)
        if left is not None and expected is not None and expected > left:
            progress(
                f"{cell.name} would take about {expected:.0f} s, {max(0.0, left):.0f} s are left: stopping"
            )
            break
        progress(f"{cell.name} ...")
        run_in_process(cell)
        result = read_cell(cell.folder, cell.config)
        if result is None:
            raise ValueError(f"cell {cell.name} ended without a result; see {cell.log}")
        measured[cell.name] = result
        _refuse_mixed_machines(measured)
        progress(f"{cell.name} took {result.seconds:.1f} s")
    return measured


def run_in_process(cell: Cell) -> None:
    """Runs a cell in a process of its own, over whatever a partial one left; raises where it fails."""
    _clear(cell.folder)
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    recipe = cell.folder.with_suffix(".yaml")
    recipe.write_text(dump_config(cell.config))
    command = [sys.executable, "-m", "paceline.bench.step_cell", str(recipe), str(time.time())]
    with (
        cell.log.open("w") as log,
        _terminated_with_us(),
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            code = process.wait()
        except BaseException:
            process.kill()
            raise
    if code:
        raise ValueError(f"cell {cell.name} failed with exit code {code}: {_quoted(cell.log)} ({cell.log})")


def _clear(folder: Path) -> None:
    """Removes a partial cell; raises where the folder is something else."""
    if not folder.exists():
        return
    if not (folder / "config.yaml").is_file() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is in the way and no cell of `bench step`; choose another --out")
    shutil.rmtree(folder)


@contextmanager
def _terminated_with_us() -> Iterator[None]:
    """Makes SIGTERM an exception within, so that `timeout` does not leave a cell's process behind."""

    def on_signal(signal_number: int, frame: object) -> None:
        raise SystemExit(128 + signal_number)

    try:
        previous = signal.signal(signal.SIGTERM, on_signal)
    except ValueError:  # not the main thread: the caller handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _quoted(log: Path) -> str:
    """Returns a failed cell's message: its error, or the end of its traceback."""
    lines = log.read_text(errors="replace").strip().splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith("error: ")), len(lines) - QUOTED_LINES)
    return "\n".join(lines[max(0, begin) :]).removeprefix("error: ")


def _expected_seconds(cell: Cell, measured: dict[str, MeasuredCell]) -> float | None:
    """Returns the longest that the same setting took, else any setting; None: nothing has run yet."""
    seconds = {name: one.seconds for name, one in measured.items()}
    own = [taken for name, taken in seconds.items() if name.rpartition("/")[0] == cell.setting.name]
    return max(own or seconds.values(), default=None)


def _refuse_mixed_machines(measured: dict[str, MeasuredCell]) -> None:
    """Raises where cells were made on different machines or versions: their times are not comparable."""
    machines = {one.machine: name for name, one in measured.items()}
    if len(machines) > 1:
        listing = "; ".join(f"{name} on {json.dumps(vars(machine))}" for machine, name in machines.items())
        raise ConfigError(
            f"cells of --out come from different machines or versions ({listing}); choose another --out, or "
            "remove the folders of one of them"
        )
