"""How long a call takes on the device at hand.

On a GPU the call is captured as a CUDA graph and replayed, so that launching costs what it costs in the
engine. Operands come in several copies, so that none is left in the cache from the launch before.
"""

import math
import time
from collections.abc import Callable

import torch

from paceline.bench.spread import Spread

REPLAYS = 2  # between two events: the second of them starts while the first one still runs
# Bytes that one call goes through at least: several times the L2 cache of a GPU, and of a CPU core.
CACHE_BYTES = {"cuda": 200_000_000, "cpu": 4_000_000}
MOST_COPIES = 24


def copies_for(num_bytes: float, device: torch.device) -> int:
    """Returns how many copies of operands of that size outgrow the device's cache."""
    return max(2, min(MOST_COPIES, math.ceil(CACHE_BYTES[device.type] / num_bytes)))


def time_call(run: Callable[[], object], device: torch.device, repeats: int) -> Spread:
    """Returns the seconds that a call takes, after one that compiles."""
    return _graph_seconds(run, repeats) if device.type == "cuda" else _host_seconds(run, repeats)


def _host_seconds(run: Callable[[], object], repeats: int) -> Spread:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return Spread.of(times)


def _graph_seconds(run: Callable[[], object], repeats: int) -> Spread:
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
