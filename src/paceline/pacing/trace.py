"""What was decided and what came of it, in rows that a file can hold and a report can plot."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.pacing.strategy import Decision, Observation, Strategy


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
                "step": step, "strategy": str(decision.strategy), "reason": decision.reason, "context": round(decision.context, 1),
                "expected": round(decision.expected, 2), "steps": row.steps, "rows": row.rows, "tokens": row.tokens, "seconds": row.seconds,
                "disturbed_seconds": row.disturbed_seconds,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")


def read_trace(path: Path) -> dict[int, list[TraceRow]]:
    """By step of the run. A last line that was cut off by a crash is not a row."""
    rows: dict[int, list[TraceRow]] = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            r = json.loads(line)
        except json.JSONDecodeError:
            break
        strategy, running = Strategy.parse(r["strategy"]), r["rows"] // max(1, r["steps"])
        decision = Decision(strategy, running, r["context"], r["expected"], r["reason"])
        rows.setdefault(r["step"], []).append(TraceRow(decision, r["steps"], r["rows"], r["tokens"], r["seconds"], r.get("disturbed_seconds", 0.0)))
    return rows


def cut_trace(path: Path, step: int) -> None:
    """Drops later steps, which a resumed run will make again."""
    if not path.is_file():
        return
    kept = {number: rows for number, rows in read_trace(path).items() if number <= step}
    path.unlink(missing_ok=True)
    for number, rows in kept.items():
        append_trace(path, number, rows)
