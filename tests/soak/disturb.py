"""What happens to a process while it runs; each becomes the `prepare` of a forked command.

Moments are counted in file operations rather than seconds, so that they fall between the writes of a
checkpoint as often as anywhere else.
"""

import errno
import os
import random
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass

# What a run does to its files goes through these.
FILE_OPERATIONS = ("rename", "replace", "fsync", "open", "ftruncate")


@dataclass(frozen=True)
class Disturbance:
    """One way to disturb a process, and how it may then end."""

    kind: str
    prepare: Callable[[], None]
    exit_codes: frozenset[int]  # besides 0: it may be too late to matter


def draw(rng: random.Random, operations: int) -> Disturbance:
    """Draws a disturbance; `operations` are those of an undisturbed run."""
    at = rng.randrange(1, max(2, operations))
    match rng.choices(("kill", "signal", "signals", "full", "limit", "none"), (35, 20, 5, 15, 15, 10))[0]:
        case "kill":
            return Disturbance("SIGKILL", _at_operation(at, _raise_signal(signal.SIGKILL)), _codes(-9))
        case "signal":
            number = rng.choice((signal.SIGTERM, signal.SIGHUP, signal.SIGINT))
            return Disturbance(number.name, _at_operation(at, _raise_signal(number)), _codes(75))
        case "signals":
            both = _at_operation(at, _raise_signal(signal.SIGTERM), then=_raise_signal(signal.SIGTERM))
            return Disturbance("two SIGTERM", _without_patience(both), _codes(75, 128 + signal.SIGTERM))
        case "full":
            return Disturbance("no space", _at_operation(at, _no_space, forever=True), _codes(1, 2))
        case "limit":
            size = int(10 ** rng.uniform(1, 5))
            return Disturbance("small files", lambda: _limit_files(size), _codes(1, 2))
        case _:
            return Disturbance("nothing", lambda: None, _codes())


def _codes(*codes: int) -> frozenset[int]:
    return frozenset((0, *codes))


def _at_operation(
    at: int, act: Callable[[], None], then: Callable[[], None] | None = None, forever: bool = False
) -> Callable[[], None]:
    """Returns a `prepare` that acts at the n-th file operation, once or from then on; `then` at the next."""

    def prepare() -> None:
        count = 0

        def watch(real: Callable) -> Callable:
            def operation(*arguments, **more):
                nonlocal count
                count += 1
                if count == at or (forever and count > at):
                    act()
                elif then is not None and count == at + 1:
                    then()
                return real(*arguments, **more)

            return operation

        for name in FILE_OPERATIONS:
            setattr(os, name, watch(getattr(os, name)))

    return prepare


def _without_patience(prepare: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        from paceline.runs import interruption

        interruption.REPEAT_SECONDS = 0.0
        prepare()

    return both


def _raise_signal(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _no_space() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
