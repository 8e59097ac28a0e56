"""What was decided and what came of it, in rows that a file can hold and a report can plot."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.pacing.strategy import Decision, Observation, Strategy

NEEDED = {"step", "strategy", "reason", "context", "expected", "steps", "rows", "tokens", "seconds"}


@dataclass
class TraceRow:
    """The steps that ran under one decision."""

    decision: Decision
    steps: int = 0
    rows: int = 0  # summed over the steps
    tokens: int = 0
    seconds: float = 0.0
    disturbed_seconds: float = 0.0  # of these, in steps that waited for something else (a prefill, a capture)

    def note(self, observation: Observation) -> None:
        self.steps += 1
        self.rows += observation.running
        self.tokens += observation.tokens
        self.seconds += observation.seconds
        self.disturbed_seconds += observation.seconds if observation.disturbed else 0.0

    @property
    def running(self) -> float:
        return self.rows / max(1, self.steps)

    @property
    def realised(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


def append_trace(path: Path, step: int, rows: Iterable[TraceRow]) -> None:
    """One line per row, under the step of the run that it belongs to."""
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


def read_trace(path: Path) -> dict[int, list[TraceRow]]:
    """By step of the run."""
    rows: dict[int, list[TraceRow]] = {}
    for r in _records(path):
        strategy, running = Strategy.parse(r["strategy"]), r["rows"] // max(1, r["steps"])
        decision = Decision(strategy, running, r["context"], r["expected"], r["reason"])
        rows.setdefault(r["step"], []).append(
            TraceRow(
                decision, r["steps"], r["rows"], r["tokens"], r["seconds"], r.get("disturbed_seconds", 0.0)
            )
        )
    return rows


def cut_trace(path: Path, step: int) -> None:
    """Drops later steps, which a resumed run will make again."""
    if not path.is_file():
        return
    beside = path.with_suffix(".tmp")
    beside.write_text(
        "".join(json.dumps(record) + "\n" for record in _records(path) if record["step"] <= step)
    )
    os.replace(beside, path)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """A line that a crash cut off or damaged is no row; the trace is for looking at, and nothing follows from
    it.
    """
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        try:
            record = json.loads(line.decode())
        except ValueError:
            continue
        if isinstance(record, dict) and record.keys() >= NEEDED:
            yield record
