"""Keeps graph capture and training apart: work on another stream corrupts or aborts a capture.

trainer    with backend.training(): ...     waits for a capture in progress, a second at most
engine     if guard.begin_capture(): ...    never waits: during training it runs the step without a graph
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class CaptureGuard:
    """A lock between one capture and any number of trainers."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._trainers = 0
        self._capturing = False

    @contextmanager
    def training(self) -> Iterator[None]:
        """Prevents captures while the context is open; waits for one that is in progress."""
        with self._changed:
            self._changed.wait_for(lambda: not self._capturing)
            self._trainers += 1
        try:
            yield
        finally:
            with self._changed:
                self._trainers -= 1

    def begin_capture(self) -> bool:
        """Begins a capture unless training or another capture is in progress; returns whether it has begun.

        Trainers wait until `end_capture`.
        """
        with self._changed:
            if self._trainers or self._capturing:
                return False
            self._capturing = True
            return True

    def end_capture(self) -> None:
        """Ends the capture; waiting trainers resume."""
        with self._changed:
            self._capturing = False
            self._changed.notify_all()
