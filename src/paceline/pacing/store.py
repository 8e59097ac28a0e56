"""What a pacer has learnt, kept with the run. Times are of one machine and one model; on another they are not
believed.

It saves a resumed run some learning and nothing else: where the file is damaged, the pacer starts without it.
"""

import json
import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

from paceline.pacing.adaptive import AdaptivePacer
from paceline.pacing.strategy import Pacer

FORMAT = 3  # of what pacers keep; what an earlier one kept is learnt again


def save_pacing(path: Path, pacer: Pacer | None, machine: str) -> None:
    if isinstance(pacer, AdaptivePacer):
        beside = path.with_suffix(".tmp")
        with beside.open("w") as file:
            file.write(json.dumps({"format": FORMAT, "machine": machine, **pacer.state()}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)


def load_pacing(path: Path, pacer: Pacer | None, machine: str, warn: Callable[[str], None] = print) -> bool:
    """False if there is nothing to start from."""
    if not isinstance(pacer, AdaptivePacer) or not path.is_file():
        return False
    try:
        state = json.loads(path.read_text())
        if state.pop("format", 1) != FORMAT or state.pop("machine") != machine:
            return False
        deepcopy(pacer).load_state(state)  # a state that fails halfway must leave nothing behind
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        warn(
            f"{path} is damaged ({type(error).__name__}: {error}); the pacer learns this machine's times "
            "again, results are the same"
        )
        return False
    pacer.load_state(state)
    return True
