"""Times steps before the first request runs, so that a pacer needs fewer trials.

Steps and drafts run on null rows, which affects no request: their time without any cached tokens, by batch
size and strategy. On a GPU they are replayed graphs, which would be captured later anyway. The most
informative come first: plain decoding at batches of all sizes, then a few tokens, then many.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from paceline.engine.launcher import Launcher
from paceline.engine.sampling import StepVariant
from paceline.pacing.strategy import StepTime, Strategy

# Replays that one time is the mean of.
REPEATS = 3
# Timing may take this many times the requested seconds, with capturing and compiling.
WITH_CAPTURES = 5.0
# The tokens per row that are timed first, beside plain decoding.
FEW_TOKENS = 3


def time_steps(launcher: Launcher, strategies: Sequence[Strategy], seconds: float) -> list[StepTime]:
    """Returns times of the strategies at some batch sizes, as many as `seconds` allow; no row may run."""
    begun = time.perf_counter()
    captured = launcher.runner.capture_seconds
    times: list[StepTime] = []
    for bucket, strategy in _by_what_they_tell(launcher, strategies):
        draft = 0.0
        if strategy.count:
            draft = _mean_seconds(launcher, partial(launcher.draft, bucket, strategy, truncates=False))
        verify = _mean_seconds(launcher, partial(launcher.verify, bucket, strategy, StepVariant()))
        times.append(StepTime(bucket, strategy, draft, verify))
        taken = time.perf_counter() - begun
        if taken - (launcher.runner.capture_seconds - captured) > seconds or taken > WITH_CAPTURES * seconds:
            break
    return times


def _by_what_they_tell(launcher: Launcher, strategies: Sequence[Strategy]) -> Iterator[tuple[int, Strategy]]:
    spread = launcher.buckets[-1:]
    while spread[-1] > 1:
        spread.append(launcher.bucket(max(1, spread[-1] // 4)))
    counts = sorted({s.count for s in strategies}, key=lambda n: (n > 0, n != FEW_TOKENS, -n))
    for count in counts:
        for bucket in spread:
            for strategy in strategies:
                if strategy.count == count and strategy.queries <= launcher.max_queries(bucket):
                    yield bucket, strategy


def _mean_seconds(launcher: Launcher, function: Callable[[], object]) -> float:
    function()  # compiles and captures
    on_gpu = launcher.runner.rows.device.type == "cuda"
    repeats = REPEATS if on_gpu else 1
    # As `step_timer.py` measures.
    clock = time.perf_counter if on_gpu else time.thread_time
    if on_gpu:
        torch.cuda.synchronize()
    start = clock()
    for _ in range(repeats):
        function()
    if on_gpu:
        torch.cuda.synchronize()
    return (clock() - start) / repeats
