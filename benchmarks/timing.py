"""How long a call takes: the one helper with which the probes of this folder measure.

    time_call    a call that is repeated: a CUDA graph on a GPU, launching costs what it does in a step
    timed        one call with all that it launches, once, by the host's clock

Operands should come in several copies (`copies_for`), so that none is left in the
cache from the launch before.
"""

import math
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from paceline.bench.spread import Spread

REPLAYS = 2  # between two events: the second of them starts while the first one still runs
# Bytes that one call goes through at least: several times the L2 cache of a GPU, and of a CPU core.
CACHE_BYTES = {"cuda": 200_000_000, "cpu": 4_000_000}
MOST_COPIES = 24

Result = TypeVar("Result")


def copies_for(num_bytes: float, device: torch.device, most: int = MOST_COPIES) -> int:
    """Returns how many copies of operands of that size outgrow the device's cache."""
    return max(2, min(most, math.ceil(CACHE_BYTES[device.type] / num_bytes)))


def time_call(run: Callable[[], object], device: torch.device, repeats: int) -> Spread:
    """Returns the seconds that a call takes, after one that compiles."""
    if device.type == "cpu":
        run()
        return Spread.of([timed(run, device)[0] for _ in range(repeats)])
    graph = _captured(run)
    graph.replay()
    times = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / REPLAYS / 1e3)
    return Spread.of(times)


def timed(run: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """Returns the seconds of one call with all that it launches, and what it returns."""
    _wait(device)
    start = time.perf_counter()
    result = run()
    _wait(device)
    return time.perf_counter() - start, result


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # compiles: nothing may be compiled during a capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph
