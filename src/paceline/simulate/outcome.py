"""The result of a simulation, as data: stage times, tokens, idle share."""

from dataclasses import dataclass

import numpy as np

from paceline.simulate.hardware import Origin
from paceline.simulate.pipeline import Pipeline, StageSeconds

TAIL_SHARE = 8  # the tail begins when at most an eighth of a step's responses still run


@dataclass(frozen=True)
class Outcome:
    """The figures of one simulation."""

    step_seconds: float  # mean over steps, without the first ones of an asynchronous pipeline
    rollout_seconds: float  # first request to last response of a step
    exposed_generation_seconds: float  # the learner waits
    tail_seconds: float
    stages: StageSeconds
    tokens: int  # responses, all learned steps
    generated_tokens: float
    tokens_per_second: float  # generated, while generating
    accept_length: float
    idle_share: float  # of the generating devices' time
    preemptions: int
    max_lag: int
    mean_lag: float
    drafter_training_seconds: float  # device seconds wanted per step
    idle_device_seconds: float  # per step, on generating devices
    provenance: dict[str, Origin]


def summarise(
    pipeline: Pipeline, devices: int, drafter_seconds: float, provenance: dict[str, Origin]
) -> Outcome:
    """Returns the outcome of a pipeline that has run; `devices` are those of one replica."""
    records, replicas, schedule = pipeline.records, pipeline.replicas, pipeline.schedule
    warm = records[schedule.lag + 1 :] if schedule.lag and len(records) > schedule.lag + 1 else records
    rollouts, tails = _rollouts_and_tails(pipeline)
    busy = sum(replica.totals.busy_seconds for replica in replicas)
    generating = _generating_seconds(pipeline, rollouts)
    generated = sum(replica.totals.tokens for replica in replicas)
    idle = max(0.0, generating * len(replicas) - busy)
    stretches = [s for replica in replicas for s in replica.totals.stretches]
    rows = sum(s.rows * s.steps for s in stretches)
    advanced = sum(s.tokens for s in stretches)
    lags = [lag for record in records for lag in record.lags]
    return Outcome(
        step_seconds=float(np.mean([record.seconds for record in warm])),
        rollout_seconds=float(np.mean(rollouts)),
        exposed_generation_seconds=float(np.mean([record.exposed_generation for record in warm])),
        tail_seconds=float(np.mean(tails)),
        stages=pipeline.stages,
        tokens=sum(record.tokens for record in records),
        generated_tokens=sum(record.generated_tokens for record in records),
        tokens_per_second=generated / max(generating, 1e-12),
        accept_length=advanced / max(1, rows),
        idle_share=idle / max(generating * len(replicas), 1e-12),
        preemptions=sum(replica.totals.preemptions for replica in replicas),
        max_lag=max(lags, default=0),
        mean_lag=float(np.mean(lags)) if lags else 0.0,
        drafter_training_seconds=drafter_seconds,
        idle_device_seconds=idle * devices / max(1, len(records)),
        provenance=provenance,
    )


def _generating_seconds(pipeline: Pipeline, rollouts: list[float]) -> float:
    """Returns the time in which devices that generate were not learning or waiting for rewards."""
    schedule, records = pipeline.schedule, pipeline.records
    if schedule.take == "batch" and schedule.lag == 0:
        return sum(rollouts)
    if schedule.take == "first" or schedule.stops:
        return sum(record.exposed_generation for record in records)
    return records[-1].stop


def _rollouts_and_tails(pipeline: Pipeline) -> tuple[list[float], list[float]]:
    """Returns the seconds of each step's rollout, and those of its tail."""
    rollouts, tails = [], []
    for _, requests, times in zip(pipeline.records, pipeline.batches, pipeline.response_times, strict=False):
        if not times:
            continue
        ordered = np.sort(np.array(times))
        start = min(request.started for request in requests)
        rollouts.append(ordered[-1] - start)
        tails.append(ordered[-1] - ordered[len(ordered) - 1 - len(ordered) // TAIL_SHARE])
    return rollouts, tails
