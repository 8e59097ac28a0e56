"""Times whole steps (decode, verify, prefill) and a rollout of the native engine, to judge a profile by.

    python -m benchmarks.simulator.measure_steps points.json --models qwen3-8b,qwen3-1.7b

The points are held out of fits; what the file already holds is kept.
"""

import argparse
import dataclasses
import datetime
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.decode import bench_decode
from benchmarks.simulator.points import (
    FIT,
    HELD_OUT,
    Measurements,
    RolloutPoint,
    StepPoint,
    load_measurements,
    write_measurements,
)
from paceline.bench.lengths import LengthDistribution, Lengths
from paceline.bench.rollout import bench_rollout
from paceline.bench.setup import bench_policy, describe
from paceline.device import best_device

FIRST_SHARE = 0.7  # of the time, for all models but the last
NEW_TOKENS = 48  # that a step's time is averaged over


class StepBench:
    """Measures points of one model until the time is up, and reports what was left out."""

    def __init__(
        self, model: str, device: torch.device, deadline: float, note: Callable[[str], None]
    ) -> None:
        self.model = model
        self.deadline = deadline
        self.note = note
        self.policy = bench_policy(model, device)
        self.steps: list[StepPoint] = []
        self.rollouts: list[RolloutPoint] = []

    def _out_of_time(self, what: str) -> bool:
        late = time.perf_counter() > self.deadline
        if late:
            self.note(f"out of time before {self.model} {what}")
        return late

    def decode(self, points: list[tuple[int, int, int]], seen: tuple[tuple[int, int, int], ...] = ()) -> None:
        """Measures steps at (rows, prompt tokens, draft tokens); a fit may look at those in `seen`."""
        for rows, prompt, k in points:
            if self._out_of_time(f"batch {rows}, prompt {prompt}, k {k}"):
                return
            (point,) = bench_decode(
                self.policy, [rows], prompt, NEW_TOKENS, repeats=1, deterministic=False, proposals=(k,)
            )
            seconds, first = point.step_ms.median / 1e3, point.prefill_ms / 1e3
            use = FIT if (rows, prompt, k) in seen else HELD_OUT
            context = prompt + NEW_TOKENS // 2
            self.steps.append(StepPoint(self.model, rows, context, seconds, k + 1, use=use))
            if not k:
                self.steps.append(StepPoint(self.model, rows, 0, first, 1, prompt))
            self.note(
                f"{self.model} batch {rows} prompt {prompt} k {k}: step {seconds * 1e3:.3f} ms, "
                f"prefill and first token {first * 1e3:.1f} ms"
            )

    def rollout(self, requests: int, prompt: int, lengths: LengthDistribution) -> None:
        """Measures a rollout in which all requests run from the start."""
        if self._out_of_time("rollout"):
            return
        values = Lengths(lengths.bench_values(requests))
        measured = bench_rollout(
            self.policy, values, prompt, requests, kv_tokens=0, repeats=1, deterministic=False
        )
        seconds, tail = measured.seconds.median, measured.tail_seconds
        drawn_from = (lengths.mean, lengths.sigma, lengths.low, lengths.high)
        self.rollouts.append(RolloutPoint(self.model, requests, prompt, drawn_from, seconds, tail))
        self.note(f"{self.model} rollout of {requests}: {seconds:.2f} s, tail {tail:.2f} s")


def measure_fully(bench: StepBench) -> None:
    """Measures decode, verify and prefill steps over the batches of a rollout, and a rollout."""
    plain = [(rows, 128, 0) for rows in (2, 8, 32, 96, 192)]
    verify = [(1, 128, 3), (8, 128, 3), (32, 128, 3), (8, 128, 7)]
    bench.decode([*plain, *verify, (16, 4096, 0)], seen=(plain[0], plain[-1]))
    bench.rollout(96, 128, LengthDistribution(256, 1.0, 16, 1024))


def measure_briefly(bench: StepBench) -> None:
    bench.decode([(rows, 128, 0) for rows in (1, 32, 128)])


def main() -> None:
    """Measures the models one after the other, and writes the points after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="file of points to write")
    parser.add_argument(
        "--models", default="qwen3-8b,qwen3-1.7b", help="shapes; the first gets most of the time"
    )
    parser.add_argument("--seconds", type=float, default=110.0, help="stop after this long")
    arguments = parser.parse_args()
    start = time.perf_counter()
    device = best_device()
    if arguments.out.is_file():
        points = load_measurements(arguments.out)
    else:
        facts = describe(device)
        software = f"torch {facts['torch']}, {facts['dtype']}"
        points = Measurements(facts["device"], software, datetime.date.today().isoformat())
    names = arguments.models.split(",")
    for number, model in enumerate(names):
        share = 1.0 if number == len(names) - 1 else FIRST_SHARE
        bench = StepBench(model, device, start + share * arguments.seconds, print)
        if number:
            measure_briefly(bench)
        else:
            measure_fully(bench)
        points = dataclasses.replace(
            points, steps=(*points.steps, *bench.steps), rollouts=(*points.rollouts, *bench.rollouts)
        )
        write_measurements(points, arguments.out)
        del bench
    print(f"written to {arguments.out}; compare with: python -m benchmarks.simulator.validate --points ...")


if __name__ == "__main__":
    main()
