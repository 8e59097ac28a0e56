"""`requests/step_N.json`: one step's requests, decoding and stages, for https://ui.perfetto.dev.

    step        rollout, learn, drafter, sync: one track
    decoding    the strategy in use, and a counter of running requests
    waiting     requests in the queue
    replicas    a track per row of the engine: prefill and decoding of the request it holds

The format is the Trace Event Format, with microseconds since the step began. Bounded: so many requests and
decisions of a step, and the newest steps alone.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.pacing.trace import TraceRow
from paceline.report.clock import StageSpan
from paceline.stats import RequestTrace, RolloutStats
from paceline.types import Group

# Steps whose requests are kept, and decisions of each.
KEPT_STEPS = 100
MOST_DECISIONS = 5000

# Characters of a prompt's id that are kept.
LONGEST_ID = 200

MICROSECONDS = 1e6

# Process ids of the groups of tracks; the rows of replica i are process ROWS + i.
STEP, DECODING, WAITING, ROWS = 1, 2, 3, 10

# An event of the format; its `ts` is of the host's clock until the step's beginning is taken off.
Event = dict[str, Any]


def write_step_trace(
    folder: Path, step: int, spans: Sequence[StageSpan], stats: RolloutStats, groups: Sequence[Group]
) -> None:
    """Writes one step's file and removes the one that is now too old."""
    if not stats.requests and not stats.trace:
        return  # rollouts that were replayed, or a generator that does not trace
    samples = {s.completion.request.id: (g.prompt_id, s.score.reward) for g in groups for s in g.samples}
    events = [
        *(_slice(STEP, 1, span.stage, span.start, span.stop) for span in spans),
        *(event for row in stats.trace[:MOST_DECISIONS] for event in _decision(row)),
        *(event for number, trace in enumerate(stats.requests) for event in _request(number, trace, samples)),
    ]
    start = min([span.start for span in spans], default=0.0)
    for event in events:
        event["ts"] = round((event["ts"] - start) * MICROSECONDS)
    record = {
        "traceEvents": [*_names(step, stats.requests), *events],
        "displayTimeUnit": "ms",
        "otherData": {"step": step, "requests left out": stats.requests_left_out},
    }
    folder.mkdir(exist_ok=True)
    _path(folder, step).write_text(json.dumps(record, separators=(",", ":")))
    _path(folder, step - KEPT_STEPS).unlink(missing_ok=True)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.json"


def _slice(process: int, track: int, name: str, start: float, stop: float, **details: Any) -> Event:
    duration = round(max(0.0, stop - start) * MICROSECONDS)
    event = {"ph": "X", "pid": process, "tid": track, "name": name, "ts": start, "dur": duration}
    return event | {"args": details} if details else event


def _names(step: int, requests: Sequence[RequestTrace]) -> Iterator[Event]:
    replicas = sorted({request.replica for request in requests})
    names = {STEP: f"step {step}", DECODING: "decoding", WAITING: "waiting requests"}
    for process, name in (names | {ROWS + replica: f"replica {replica}" for replica in replicas}).items():
        yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
    for replica, row in sorted(
        {(request.replica, row) for request in requests for *_, row in request.moments}
    ):
        if row >= 0:
            args = {"name": f"row {row}"}
            yield {"ph": "M", "pid": ROWS + replica, "tid": row + 1, "name": "thread_name", "args": args}


def _decision(row: TraceRow) -> Iterator[Event]:
    yield _slice(
        DECODING,
        1,
        str(row.decision.strategy),
        row.begun,
        row.begun + row.seconds,
        reason=row.decision.reason,
        steps=row.steps,
        tokens=row.tokens,
        draft_seconds=round(row.draft_seconds, 6),
    )
    args = {"requests": round(row.running, 1)}
    yield {"ph": "C", "pid": DECODING, "tid": 0, "name": "running requests", "ts": row.begun, "args": args}


def _request(number: int, trace: RequestTrace, samples: Mapping[str, tuple[str, float]]) -> Iterator[Event]:
    """Yields what a request did: in its row's track while it has one, else among those that wait.

    Slices of one track must not overlap, and waiting requests do, so each has an asynchronous one.
    """
    prompt, reward = samples.get(trace.id, ("", math.nan))
    details = {
        "prompt": prompt[:LONGEST_ID],
        "prompt_tokens": trace.prompt_tokens,
        "tokens": trace.tokens,
        "reward": reward if math.isfinite(reward) else None,
        "end": str(trace.reason),
    }
    for (stage, start, row), (_, stop, _) in zip(trace.moments, trace.moments[1:], strict=False):
        if row < 0:
            span = {"cat": "request", "id": number, "pid": WAITING, "tid": 0, "name": trace.id}
            yield span | {"ph": "b", "ts": start}
            yield span | {"ph": "e", "ts": stop}
        elif stage == "decode":
            yield _slice(ROWS + trace.replica, row + 1, trace.id, start, stop, **details)
        else:
            yield _slice(ROWS + trace.replica, row + 1, f"{stage} {trace.id}", start, stop)
