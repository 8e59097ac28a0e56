"""Keeps graph capture and training apart: capturing while another stream trains corrupts or aborts the
capture.

trainer    with backend.training(): ...        waits for a capture that is under way, a second at most
engine     if guard.begin_capture(): ...       never waits: while somebody trains it runs the step without a graph
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class CaptureGuard:
    def __init__(self) -> None:
        self._changed = Condition()
        self._trainers = 0
        self._capturing = False

    @contextmanager
    def training(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._capturing)
            self._trainers += 1
        try:
            yield
        finally:
            with self._changed:
                self._trainers -= 1

    def begin_capture(self) -> bool:
        """True: nobody trains, and nobody will begin to until `end_capture`."""
        with self._changed:
            if self._trainers or self._capturing:
                return False
            self._capturing = True
            return True

    def end_capture(self) -> None:
        with self._changed:
            self._capturing = False
            self._changed.notify_all()
