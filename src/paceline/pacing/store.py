"""What a pacer has learnt, kept with the run. Times are of one machine and one model; on another they are not believed."""

import json
import os
from pathlib import Path

from paceline.pacing.adaptive import AdaptivePacer
from paceline.pacing.strategy import Pacer

FORMAT = 2  # of what pacers keep; what an earlier one kept is learnt again


def save_pacing(path: Path, pacer: Pacer | None, machine: str) -> None:
    if isinstance(pacer, AdaptivePacer):
        beside = path.with_suffix(".tmp")
        beside.write_text(json.dumps({"format": FORMAT, "machine": machine, **pacer.state()}) + "\n")
        os.replace(beside, path)


def load_pacing(path: Path, pacer: Pacer | None, machine: str) -> bool:
    """False if there is nothing to start from."""
    if not isinstance(pacer, AdaptivePacer) or not path.is_file():
        return False
    state = json.loads(path.read_text())
    if state.pop("format", 1) != FORMAT or state.pop("machine") != machine:
        return False
    pacer.load_state(state)
    return True
