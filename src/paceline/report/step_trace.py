"""`requests/step_N.json`: when each request of a step waited, prefilled, decoded and left; its stages.

Bounded: so many requests and decisions of a step, and the newest steps alone. Times are seconds since the
step began.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.report.clock import StageSpan
from paceline.stats import RequestTrace, RolloutStats
from paceline.types import Group

# Steps whose requests are kept.
KEPT_STEPS = 100

# Decisions of a step that are kept.
MOST_DECISIONS = 5000

# Characters of a prompt's id that are kept.
LONGEST_ID = 200

# Digits after the point of a second: microseconds.
DIGITS = 6


def write_step_trace(
    folder: Path, step: int, spans: Sequence[StageSpan], stats: RolloutStats, groups: Sequence[Group]
) -> None:
    """Writes one step's file and removes the one that is now too old."""
    if not stats.requests and not stats.trace:
        return  # rollouts that were replayed, or a generator that does not trace
    start = min([span.start for span in spans], default=0.0)
    samples = {s.completion.request.id: (g.prompt_id, s.score.reward) for g in groups for s in g.samples}
    record = {
        "step": step,
        "stages": [[span.stage, _since(start, span.start), _since(start, span.stop)] for span in spans],
        "requests": [_request(trace, samples, start) for trace in stats.requests],
        "left_out": stats.requests_left_out,
        "decisions": [
            {
                "start": _since(start, row.begun),
                "seconds": round(row.seconds, DIGITS),
                "draft_seconds": round(row.draft_seconds, DIGITS),
                "strategy": str(row.decision.strategy),
                "reason": row.decision.reason,
                "steps": row.steps,
                "running": round(row.running, 1),
                "tokens": row.tokens,
            }
            for row in stats.trace[:MOST_DECISIONS]
        ],
    }
    folder.mkdir(exist_ok=True)
    _path(folder, step).write_text(json.dumps(record, separators=(",", ":")))
    _path(folder, step - KEPT_STEPS).unlink(missing_ok=True)


def traced_steps(folder: Path) -> list[int]:
    """Returns the steps whose requests are recorded."""
    names = [file.stem.removeprefix("step_") for file in folder.glob("step_[0-9]*.json")]
    return sorted(int(name) for name in names if name.isdigit())


def read_step_trace(folder: Path, step: int) -> dict[str, Any] | None:
    """Returns what was recorded of a step; None where it is not there or damaged."""
    try:
        record = json.loads(_path(folder, step).read_bytes())
        return _checked(record)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.json"


def _since(start: float, moment: float) -> float:
    return round(moment - start, DIGITS)


def _request(trace: RequestTrace, samples: Mapping[str, tuple[str, float]], start: float) -> dict[str, Any]:
    prompt, reward = samples.get(trace.id, ("", math.nan))
    return {
        "id": trace.id,
        "prompt": prompt[:LONGEST_ID],
        "replica": trace.replica,
        "prompt_tokens": trace.prompt_tokens,
        "tokens": trace.tokens,
        "reward": reward if math.isfinite(reward) else None,
        "end": str(trace.reason),
        "moments": [[stage, _since(start, begin), row] for stage, begin, row in trace.moments],
    }


def _checked(record: Any) -> dict[str, Any]:
    """Returns a record whose parts have the types that its readers rely on; raises where it has not."""
    return {
        "step": int(record["step"]),
        "stages": [(str(stage), float(start), float(stop)) for stage, start, stop in record["stages"]],
        "left_out": int(record["left_out"]),
        "requests": [
            {
                "id": str(request["id"]),
                "prompt": str(request["prompt"]),
                "replica": int(request["replica"]),
                "prompt_tokens": int(request["prompt_tokens"]),
                "tokens": int(request["tokens"]),
                "reward": None if request["reward"] is None else float(request["reward"]),
                "end": str(request["end"]),
                "moments": [(str(stage), float(start), int(row)) for stage, start, row in request["moments"]],
            }
            for request in record["requests"]
        ],
        "decisions": [
            {
                "start": float(row["start"]),
                "seconds": float(row["seconds"]),
                "draft_seconds": float(row["draft_seconds"]),
                "strategy": str(row["strategy"]),
                "reason": str(row["reason"]),
                "steps": int(row["steps"]),
                "running": float(row["running"]),
                "tokens": int(row["tokens"]),
            }
            for row in record["decisions"]
        ],
    }
