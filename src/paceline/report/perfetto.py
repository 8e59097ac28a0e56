"""A step's course as a trace that Perfetto and chrome://tracing open (the Trace Event Format).

    stages      rollout, learn, drafter, sync: one track
    decoding    strategies; drafting and verification: three tracks, and a counter of running requests
    waiting     requests in the queue
    rows        one track per replica and row of the engine: prefill and decoding of the request it holds

A decision covers several decode steps. Its drafting is shown before its verification, as one piece each:
their seconds are right, their turns within the decision are not kept.
"""

from collections.abc import Iterator
from typing import Any

MICROSECONDS = 1e6

# Process ids of the groups of tracks; the rows of replica i are process ROWS + i.
STEP, DECODING, WAITING, ROWS = 1, 2, 3, 10

# Tracks of the process `DECODING`.
STRATEGY, DRAFTING, VERIFYING = 1, 2, 3


def to_perfetto(trace: dict[str, Any]) -> dict[str, Any]:
    """Returns the trace of one step, as `read_step_trace` gives it, in the Trace Event Format."""
    return {
        "traceEvents": [*_names(trace), *_stages(trace), *_decisions(trace), *_requests(trace)],
        "displayTimeUnit": "ms",
        "otherData": {"step": trace["step"], "requests left out": trace["left_out"]},
    }


def _slice(process: int, track: int, name: str, start: float, stop: float, **details: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": track,
        "name": name,
        "ts": round(start * MICROSECONDS, 3),
        "dur": round(max(0.0, stop - start) * MICROSECONDS, 3),
        "args": details,
    }


def _name(process: int, name: str, track: int | None = None) -> dict[str, Any]:
    kind = "process_name" if track is None else "thread_name"
    return {"ph": "M", "pid": process, "tid": track or 0, "name": kind, "args": {"name": name}}


def _names(trace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield _name(STEP, f"step {trace['step']}")
    yield _name(STEP, "stages", 1)
    yield _name(DECODING, "decoding")
    for track, name in ((STRATEGY, "strategy"), (DRAFTING, "drafting"), (VERIFYING, "verification")):
        yield _name(DECODING, name, track)
    yield _name(WAITING, "waiting requests")
    rows = {(request["replica"], row) for request in trace["requests"] for _, _, row in request["moments"]}
    for replica in sorted({replica for replica, _ in rows}):
        yield _name(ROWS + replica, f"replica {replica}")
    for replica, row in sorted(rows):
        if row >= 0:
            yield _name(ROWS + replica, f"row {row}", row + 1)


def _stages(trace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    names = {"learn": "learning", "drafter": "drafter training"}
    for stage, start, stop in trace["stages"]:
        yield _slice(STEP, 1, names.get(stage, stage), start, stop)


def _decisions(trace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in trace["decisions"]:
        start = row["start"]
        drafted = start + row["draft_seconds"]
        stop = start + row["seconds"]
        details = {name: row[name] for name in ("reason", "steps", "running", "tokens")}
        yield _slice(DECODING, STRATEGY, row["strategy"], start, stop, **details)
        if row["draft_seconds"]:
            yield _slice(DECODING, DRAFTING, f"draft {row['strategy']}", start, drafted, steps=row["steps"])
        yield _slice(DECODING, VERIFYING, "verify" if row["draft_seconds"] else "decode", drafted, stop)
        counter = {"ph": "C", "pid": DECODING, "tid": 0, "name": "running requests"}
        yield counter | {"ts": round(start * MICROSECONDS, 3), "args": {"requests": row["running"]}}


def _requests(trace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields what a request did: in its row's track while it has one, else among those that wait.

    Slices of one track must not overlap, and waiting requests do, so each has an asynchronous one.
    """
    for number, request in enumerate(trace["requests"]):
        details = {
            name: request[name] for name in ("id", "prompt", "prompt_tokens", "tokens", "reward", "end")
        }
        moments = request["moments"]
        for (stage, start, row), (_, stop, _) in zip(moments, moments[1:], strict=False):
            if stage != "waiting" and row >= 0:
                name = request["id"] if stage == "decode" else f"prefill {request['id']}"
                yield _slice(ROWS + request["replica"], row + 1, name, start, stop, stage=stage, **details)
                continue
            span = {"cat": "request", "id": number, "pid": WAITING, "tid": 0, "name": request["id"]}
            yield span | {"ph": "b", "ts": round(start * MICROSECONDS, 3), "args": details}
            yield span | {"ph": "e", "ts": round(stop * MICROSECONDS, 3)}
