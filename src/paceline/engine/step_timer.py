"""How long steps take, without waiting for them: marks in the stream that are read when the step's outcome
is.

    ready ─────── drafted ─────────── ready        a step's time runs from the end of the one before it
      └ draft seconds ┘└ verify seconds ┘          so what the host adds between steps counts as well

On a GPU marks are CUDA events; on a CPU, where a step has ended when its call returns, they are the clock.
"""

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepTiming:
    begun: torch.cuda.Event | float
    drafted: torch.cuda.Event | float | None  # None: nobody drafted
    ready: torch.cuda.Event | float
    switched: bool  # its drafter had to catch up
    disturbed: bool  # a prefill, a capture or a pause is in its time

    def wait(self) -> None:
        if isinstance(self.ready, torch.cuda.Event):
            self.ready.synchronize()

    def seconds(self) -> tuple[float, float]:
        """Drafting and verifying; once `ready`."""
        if self.drafted is None:
            return 0.0, _between(self.begun, self.ready)
        return _between(self.begun, self.drafted), _between(self.drafted, self.ready)


class StepTimer:
    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._begun: torch.cuda.Event | float | None = None
        self._drafted: torch.cuda.Event | float | None = None
        self._switched = self._disturbed = False

    def pause(self) -> None:
        """The engine does nothing now: the next step's time begins with itself."""
        self._begun = None

    def note_switch(self) -> None:
        self._switched = True

    def note_disturbance(self) -> None:
        self._disturbed = True

    def begin(self) -> None:
        if self._begun is None:
            self._begun = self._mark()
            self._disturbed |= self._on_gpu  # the host is not ahead yet, and launching is in its time

    def note_drafted(self) -> None:
        self._drafted = self._mark()

    def finish(self) -> StepTiming:
        """After everything of the step has been launched."""
        ready = self._mark()
        timing = StepTiming(self._begun, self._drafted, ready, self._switched, self._disturbed)
        self._begun, self._drafted, self._switched, self._disturbed = ready, None, False, False
        return timing

    def _mark(self) -> torch.cuda.Event | float:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(start: torch.cuda.Event | float, stop: torch.cuda.Event | float) -> float:
    return stop - start if isinstance(start, float) else start.elapsed_time(stop) / 1e3
