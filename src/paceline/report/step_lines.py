"""Finds one step's lines in a file of JSON lines whose steps ascend, without reading the others."""

import json
from pathlib import Path
from typing import Any

# Bytes of a stretch that is read from its beginning once the search has come down to it.
STRETCH = 65_536

# The longest line that is looked at: above, somebody else wrote it.
LONGEST_LINE = 1_000_000


def lines_of_step(path: Path, step: int) -> list[dict[str, Any]]:
    """Returns the records of one step; lines that are damaged are left out."""
    try:
        file = path.open("rb")
    except OSError:
        return []
    with file:
        low, high = 0, path.stat().st_size
        while high - low > STRETCH:
            middle = (low + high) // 2
            file.seek(middle)
            file.readline(LONGEST_LINE)  # the rest of a line
            found = _record(file.readline(LONGEST_LINE))
            if found is not None and found["step"] < step:
                low = middle
            else:
                high = middle
        file.seek(low)
        if low:
            file.readline(LONGEST_LINE)
        lines = []
        for line in iter(lambda: file.readline(LONGEST_LINE), b""):
            record = _record(line)
            if record is None or record["step"] < step:
                continue
            if record["step"] > step:
                break
            lines.append(record)
        return lines


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
