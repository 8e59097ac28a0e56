"""How long steps take, without waiting for them: marks in the stream, read with the step's outcome.

    ready ─────── drafted ─────────── ready        a step's time runs from the end of the one before it
      └ draft seconds ┘└ verify seconds ┘          so what the host adds between steps counts as well

On a GPU marks are CUDA events; on a CPU, where a step has ended when its call returns, they are the clock.
"""

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepTiming:
    """The marks of one step."""

    begun: torch.cuda.Event | float
    # None: nobody drafted.
    drafted: torch.cuda.Event | float | None
    ready: torch.cuda.Event | float
    # Its drafter had to catch up.
    switched: bool
    # A prefill, a capture or a pause is in its time.
    disturbed: bool

    def wait(self) -> None:
        """Waits until the step has ended."""
        if isinstance(self.ready, torch.cuda.Event):
            self.ready.synchronize()

    def seconds(self) -> tuple[float, float]:
        """Returns the seconds of drafting and of verifying; valid once the step has ended."""
        if self.drafted is None:
            return 0.0, _between(self.begun, self.ready)
        return _between(self.begun, self.drafted), _between(self.drafted, self.ready)


class StepTimer:
    """Makes the marks of one step after the other."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._begun: torch.cuda.Event | float | None = None
        self._drafted: torch.cuda.Event | float | None = None
        self._switched = False
        self._disturbed = False

    def pause(self) -> None:
        """Notes that the engine does nothing now: the next step's time begins with itself."""
        self._begun = None

    def note_switch(self) -> None:
        """Notes that the next step's drafter had to catch up."""
        self._switched = True

    def note_disturbance(self) -> None:
        """Notes that something besides the step is in its time."""
        self._disturbed = True

    def begin(self) -> None:
        """Marks the beginning of a step that does not follow another."""
        if self._begun is None:
            self._begun = self._mark()
            # On a GPU the host is not ahead yet, and launching is in the step's time.
            self._disturbed |= self._on_gpu

    def note_drafted(self) -> None:
        """Marks the end of drafting."""
        self._drafted = self._mark()

    def finish(self) -> StepTiming:
        """Marks the end of a step, after all of it has been launched, and returns its marks."""
        ready = self._mark()
        timing = StepTiming(self._begun, self._drafted, ready, self._switched, self._disturbed)
        self._begun = ready
        self._drafted = None
        self._switched = False
        self._disturbed = False
        return timing

    def _mark(self) -> torch.cuda.Event | float:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(start: torch.cuda.Event | float, stop: torch.cuda.Event | float) -> float:
    return stop - start if isinstance(start, float) else start.elapsed_time(stop) / 1e3
