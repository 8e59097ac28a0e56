"""Measures how long each stage of a step takes and its peak memory."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StageSpan:
    """A stage and when it ran, on the host's `time.perf_counter`."""

    stage: str
    start: float
    stop: float


class StageClock:
    """Adds up seconds and peak memory by stage: `with clock("rollout"): ...`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}
        self.spans: list[StageSpan] = []
        self.stage = ""  # what runs now

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        start = time.perf_counter()
        self.stage = stage
        try:
            yield
        finally:  # a failed attempt counts as well
            self.stage = ""
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            stop = time.perf_counter()
            self.spans.append(StageSpan(stage, start, stop))
            self.seconds[stage] = self.seconds.get(stage, 0.0) + stop - start
            self.peak_bytes[stage] = max(self.peak_bytes.get(stage, 0), self._peak())

    def take_metrics(self) -> dict[str, float]:
        """Returns seconds and peak gigabytes per stage since the last call."""
        metrics = {f"time/{stage}": seconds for stage, seconds in self.seconds.items()}
        metrics |= {f"memory/{stage}_gb": peak / 1e9 for stage, peak in self.peak_bytes.items()}
        self.seconds = {}
        self.peak_bytes = {}
        return metrics

    def take_spans(self) -> list[StageSpan]:
        """Returns when each stage ran since the last call, in order."""
        spans, self.spans = self.spans, []
        return spans

    def _peak(self) -> int:
        """Returns the stage's own peak on a GPU; on a CPU only the process's high-water mark is known."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
