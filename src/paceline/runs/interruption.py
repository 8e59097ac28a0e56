"""SIGINT, SIGTERM and SIGHUP: the first asks a run to stop, the next one ends it.

Schedulers preempt with SIGTERM, a closed terminal sends SIGHUP, Ctrl-C is SIGINT; a run treats them alike:

    setting up              ──signal──▶ ends at once, nothing is lost
    deferred() (the loop)   ──signal──▶ the step is finished and saved   ──another──▶ ends at once

A signal that the process was started to ignore (`nohup`, a background job of a script) stays ignored. Light
to import: the command line installs it before torch is loaded.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = tuple(
    getattr(signal.Signals, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal.Signals, name)
)

# Wrappers forward a signal that the process group has received already: repeats within this time are ignored.
REPEAT_SECONDS = 0.3

# Exit codes of `paceline train`; 0: finished, 2: refused. Any other code above 128 is 128 + the signal that
# ended it at once.
EXIT_FAILED = 1
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: try again later, here with --resume


class Interrupted(KeyboardInterrupt):
    """Raised where a signal ends the process at once."""

    def __init__(self, number: int, again: bool) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.again = again  # not the first signal, so a step in progress is lost

    @property
    def exit_code(self) -> int:
        """The exit code: 128 + signal where a step is lost, otherwise `EXIT_INTERRUPTED`."""
        return 128 + self.number if self.again else EXIT_INTERRUPTED


class Interruption:
    """Whether this process was asked to stop: `with Interruption() as interruption: ...`.

    Outside the main thread no handler is installed: the caller handles signals.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._requested_at = 0.0
        self._deferring = False
        self._pause: Callable[[], None] | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __bool__(self) -> bool:
        return self.requested is not None

    def __enter__(self) -> "Interruption":
        for number in SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:
                continue
            with contextlib.suppress(ValueError):  # not the main thread
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within, the first signal only sets `requested`; the code polls it where it can stop."""
        before, self._deferring = self._deferring, True
        try:
            yield
        finally:
            self._deferring = before

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within, a signal raises `Interrupted` immediately: nothing needs to be finished or saved."""
        before, self._deferring = self._deferring, False
        try:
            yield
        finally:
            self._deferring = before

    @contextmanager
    def pausing(self, pause: Callable[[], None]) -> Iterator[None]:
        """Within, the first signal also calls `pause`, which must only set a flag."""
        self._pause = pause
        try:
            yield
        finally:
            self._pause = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = self.requested is not None
        if again and now - self._requested_at < REPEAT_SECONDS:
            return
        if not again:
            self.requested = signal.Signals(number)
            self._requested_at = now
        if again or not self._deferring:
            raise Interrupted(number, again)
        if self._pause is not None:
            self._pause()
        _say(
            f"{self.requested.name if self.requested else number}: finishing this step and saving it "
            "(once more to stop at once)"
        )


def _say(text: str) -> None:
    """Writes a line past Python's buffers: a handler may have interrupted a write to one of them."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.write(sys.__stderr__.fileno(), f"{text}\n".encode())
