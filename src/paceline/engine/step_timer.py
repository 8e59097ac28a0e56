"""Times steps without waiting for them: marks in the stream, read with the step's outcome.

    ready ─────── drafted ─────────── ready        a step's time runs from the end of the one before it
      └ draft seconds ┘└ verify seconds ┘          so the host's time between steps counts as well

A prefill between two steps has marks of its own; its seconds, in wall-clock time, are reported beside the
next step's.

On a GPU marks are CUDA events. On a CPU, where a step has ended when its call returns, they are the thread's
processor time: the time of a step on an idle machine. In wall-clock time a step that another process
interrupts takes several times as long, and a pacer that has timed a strategy so for three steps would not
choose it again for thousands.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Mark = torch.cuda.Event | float


@dataclass(frozen=True)
class StepTiming:
    """The marks of one step."""

    begun: Mark
    drafted: Mark | None  # None: no draft
    ready: Mark
    switched: bool  # its drafter had to catch up
    disturbed: bool  # a prefill, a capture or a pause is in its time
    prefills: tuple[tuple[Mark, Mark], ...] = ()  # begin and end of those before it

    def wait(self) -> None:
        if isinstance(self.ready, torch.cuda.Event):
            self.ready.synchronize()

    def seconds(self) -> tuple[float, float]:
        """Returns the seconds of drafting and of verifying; valid once the step has ended."""
        if self.drafted is None:
            return 0.0, _between(self.begun, self.ready)
        return _between(self.begun, self.drafted), _between(self.drafted, self.ready)

    def prefill_seconds(self) -> float:
        """Returns the seconds of the prefills before this step; valid once it is `ready`."""
        return sum(_between(begin, end) for begin, end in self.prefills)


class StepTimer:
    """Sets the marks of each step."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._begun: Mark | None = None
        self._drafted: Mark | None = None
        self._switched = False
        self._disturbed = False
        self._prefills: list[tuple[Mark, Mark]] = []

    def pause(self) -> None:
        """Marks the engine as idle, so that the gap is not counted."""
        self._begun = None

    def note_switch(self) -> None:
        self._switched = True

    def note_disturbance(self) -> None:
        self._disturbed = True

    @contextmanager
    def prefill(self) -> Iterator[None]:
        """Marks a prefill, which disturbs the next step's time."""
        begin = self._mark(time.perf_counter)
        yield
        self._prefills.append((begin, self._mark(time.perf_counter)))
        self.note_disturbance()

    def begin(self) -> None:
        """Marks the beginning of a step that does not follow another."""
        if self._begun is None:
            self._begun = self._mark()
            # On a GPU the host is not ahead yet, so the step's time includes launching.
            self._disturbed |= self._on_gpu

    def note_drafted(self) -> None:
        self._drafted = self._mark()

    def finish(self) -> StepTiming:
        """Marks the end of a step, after all of its launches, and returns its marks."""
        ready = self._mark()
        timing = StepTiming(
            self._begun, self._drafted, ready, self._switched, self._disturbed, tuple(self._prefills)
        )
        self._begun = ready
        self._drafted = None
        self._switched = False
        self._disturbed = False
        self._prefills = []
        return timing

    def _mark(self, cpu_clock: Callable[[], float] = time.thread_time) -> Mark:
        if not self._on_gpu:
            return cpu_clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(start: Mark, stop: Mark) -> float:
    return stop - start if isinstance(start, float) else start.elapsed_time(stop) / 1e3
