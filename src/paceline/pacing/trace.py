"""`trace.jsonl`: decisions and their outcomes, in rows that a report can plot."""

import json
import os
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.pacing.strategy import Decision, Observation, Strategy

# Keys that every row must have; `disturbed_seconds` was added later.
REQUIRED_KEYS = {"step", "strategy", "reason", "context", "expected", "steps", "rows", "tokens", "seconds"}


@dataclass
class TraceRow:
    """The steps that ran under one decision."""

    decision: Decision
    steps: int = 0
    # Rows that ran, summed over the steps.
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    # Of these seconds, those of steps that waited for something else (a prefill, a capture).
    disturbed_seconds: float = 0.0
    # Of all the seconds, those of drafting.
    draft_seconds: float = 0.0
    # Begin of its first step on the host's clock; 0 for rows read from a file.
    begun: float = 0.0

    def note(self, observation: Observation) -> None:
        if not self.steps:
            self.begun = time.perf_counter() - observation.seconds
        self.steps += 1
        self.rows += observation.running
        self.tokens += observation.tokens
        self.seconds += observation.seconds
        self.disturbed_seconds += observation.seconds if observation.disturbed else 0.0
        self.draft_seconds += observation.draft_seconds

    @property
    def running(self) -> float:
        """Rows that ran, on average."""
        return self.rows / max(1, self.steps)

    @property
    def realised(self) -> float:
        """Measured tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


def append_trace(path: Path, step: int, rows: Iterable[TraceRow]) -> None:
    """Appends one line per row, under the training step that its rollout belongs to."""
    with path.open("a") as file:
        for row in rows:
            decision = row.decision
            record = {
                "step": step,
                "strategy": str(decision.strategy),
                "reason": decision.reason,
                "context": round(decision.context, 1),
                "expected": round(decision.expected, 2),
                "steps": row.steps,
                "rows": row.rows,
                "tokens": row.tokens,
                "seconds": row.seconds,
                "disturbed_seconds": row.disturbed_seconds,
            }
            file.write(json.dumps(record) + "\n")


def read_trace(path: Path, steps: Collection[int] | None = None) -> dict[int, list[TraceRow]]:
    """Returns the rows of each training step, or of these steps alone; invalid lines are skipped."""
    rows: dict[int, list[TraceRow]] = {}
    for record in _records(path, steps):
        try:
            row = _row(record)
        except (TypeError, ValueError, AttributeError):
            continue
        rows.setdefault(record["step"], []).append(row)
    return rows


def _row(record: dict[str, Any]) -> TraceRow:
    return TraceRow(
        decision=Decision(
            # Without the most tokens per row, which an earlier version wrote where rows shared them.
            Strategy.parse(record["strategy"].partition("~")[0]),
            running=record["rows"] // max(1, record["steps"]),
            context=record["context"],
            expected=record["expected"],
            reason=record["reason"],
        ),
        steps=record["steps"],
        rows=record["rows"],
        tokens=record["tokens"],
        seconds=record["seconds"],
        disturbed_seconds=record.get("disturbed_seconds", 0.0),
    )


def cut_trace(path: Path, step: int) -> None:
    """Drops steps after `step`, which a resumed run reruns."""
    if not path.is_file():
        return
    beside = path.with_suffix(".tmp")
    beside.write_text(
        "".join(json.dumps(record) + "\n" for record in _records(path) if record["step"] <= step)
    )
    os.replace(beside, path)


def _records(path: Path, steps: Collection[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yields the valid rows, without lines that a crash cut off or damaged.

    The trace is for display only; no decision reads it.
    """
    lines = path.read_bytes().split(b"\n") if path.is_file() else ()
    begins = None if steps is None else {b'{"step": %d' % step for step in steps}
    for line in lines:
        if begins is not None and line[: line.find(b",")] not in begins:
            continue
        try:
            record = json.loads(line.decode())
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and record.keys() >= REQUIRED_KEYS and isinstance(record["step"], int):
            yield record
