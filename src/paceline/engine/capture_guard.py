"""Keeps graph capture and training apart: work on another stream corrupts or aborts a capture.

trainer    with backend.training(): ...     waits for a capture that is under way, a second at most
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
        """Keeps captures from beginning while the context is open; waits for one that is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._capturing)
            self._trainers += 1
        try:
            yield
        finally:
            with self._changed:
                self._trainers -= 1

    def begin_capture(self) -> bool:
        """Begins a capture unless somebody trains or captures; returns whether it has begun.

        Nobody begins to train until `end_capture`.
        """
        with self._changed:
            if self._trainers or self._capturing:
                return False
            self._capturing = True
            return True

    def end_capture(self) -> None:
        """Ends the capture and lets waiting trainers go on."""
        with self._changed:
            self._capturing = False
            self._changed.notify_all()
