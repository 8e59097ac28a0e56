"""`pacing.json`: what a pacer has learned, kept with the run; and its times alone in the user's cache.

Times belong to one machine and one model; on another they are ignored. The file saves a resumed run some
learning and nothing else: where it is damaged, or of an unknown format, the pacer starts without it. A new
run on the same machine, with the same model, loads the times of earlier ones from the cache
(`$XDG_CACHE_HOME/paceline/pacing`, by default in `~/.cache`); acceptance belongs to a run and is not cached.
"""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path

from paceline.pacing.adaptive import AdaptivePacer
from paceline.pacing.strategy import Pacer

# The format that is written. It and the one before it can be read; the content of earlier ones is dropped.
FORMAT = 4


def save_pacing(path: Path, pacer: Pacer | None, machine: str) -> None:
    """Writes what an adaptive pacer has learned on `machine`, atomically; other pacers write nothing."""
    if not isinstance(pacer, AdaptivePacer):
        return
    beside = path.with_suffix(".tmp")
    with beside.open("w") as file:
        file.write(json.dumps({"format": FORMAT, "machine": machine, **pacer.state()}) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def load_pacing(path: Path, pacer: Pacer | None, machine: str, warn: Callable[[str], None] = print) -> bool:
    """Loads what was learned on this machine into the pacer; returns False if there is nothing to load."""
    if not isinstance(pacer, AdaptivePacer) or not path.is_file():
        return False
    try:
        state = json.loads(path.read_text())
        version = state.pop("format", 1)
        if version not in (3, FORMAT) or state.pop("machine") != machine:
            return False
        if version == 3:
            state = upgrade_format_3(state)
        deepcopy(pacer).load_state(state)  # a state that fails halfway must not change the pacer
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        warn(
            f"{path} is damaged ({type(error).__name__}: {error}); "
            "the pacer learns this machine's times again, results are the same"
        )
        return False
    pacer.load_state(state)
    return True


def times_path(machine: str) -> Path:
    """Returns the path of a machine's and model's times in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "paceline" / "pacing" / f"{hashlib.sha256(machine.encode()).hexdigest()[:32]}.json"


def save_times(pacer: Pacer | None, machine: str) -> None:
    """Writes an adaptive pacer's times to the user's cache; a cache that cannot be written is ignored."""
    if not isinstance(pacer, AdaptivePacer) or not pacer.cost.knows_times:
        return
    path = times_path(machine)
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps({"format": FORMAT, "machine": machine, "cost": pacer.cost.state()}))
        os.replace(beside, path)
    except OSError:
        with suppress(OSError):
            beside.unlink()


def load_times(pacer: Pacer | None, machine: str) -> bool:
    """Loads the times of earlier runs from the user's cache; returns False if there are none."""
    if not isinstance(pacer, AdaptivePacer) or pacer.cost.knows_times:
        return False
    try:
        state = json.loads(times_path(machine).read_text())
        if state["format"] != FORMAT or state["machine"] != machine:
            return False
        deepcopy(pacer.cost).load_state(state["cost"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        return False
    pacer.cost.load_state(state["cost"])
    return True


def upgrade_format_3(state: dict) -> dict:
    """Converts a state of format 3, which had lists in place of names, to the current one."""
    cost = state["cost"]
    steps_seen, load_squared, load_times_seconds = cost["load"]
    return {
        "cost": {
            "verify": {
                "estimates": [
                    {"bucket": bucket, "queries": queries, "context_class": where, "time": _time(cell)}
                    for bucket, queries, where, cell in cost["steps"]
                ],
                "slope": {"load_squared": load_squared, "load_times_seconds": load_times_seconds},
                "steps_seen": steps_seen,
            },
            "drafts": [
                {"drafter": drafter, "count": count, "bucket": bucket, "time": _time(cell)}
                for drafter, count, bucket, cell in cost["drafts"]
            ],
            "switches": [{"drafter": drafter, "time": _time(cell)} for drafter, cell in cost["switches"]],
        },
        "acceptance": {
            drafter: [_counts(where, *counts) for where, counts in by_situation.items()]
            for drafter, by_situation in state["acceptance"].items()
        },
    }


def _time(cell: dict) -> dict:
    return {
        "seconds": cell["seconds"],
        "load": cell["load"],
        "steps": cell["steps"],
        "updated_at": cell["noted_at"],
    }


def _counts(where: str, reached: list[float], survived: list[float]) -> dict:
    """Returns the counts of `where`: "all", or a batch class and a context class with a comma between."""
    situation = None
    if where != "all":
        batch_class, context_class = where.split(",")
        situation = {"batch_class": int(batch_class), "context_class": int(context_class)}
    return {"situation": situation, "reached": reached, "survived": survived}
