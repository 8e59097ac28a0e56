"""Kills a worker with all of its descendants, including those that have left its session.

On Linux a worker adopts the orphans among its descendants (`adopt_orphans`), so they stay below it; what was
started and orphaned by a worker that is dead already carries the worker's mark in its environment. Elsewhere
only the worker's own process group is killed.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MARK = "PACELINE_REWARD_WORKER"

PROC = Path("/proc")
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

# Seconds after which a process that starts others faster than they are found is left alone.
MAX_SECONDS = 5.0

# Consecutive scans that must find no new and no running process, and the seconds between two.
QUIET_LOOKS = 3
LOOK_SECONDS = 0.005


@dataclass(frozen=True)
class Process:
    """A running process."""

    pid: int
    parent: int
    group: int
    session: int


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants' orphans, where the system supports it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_descendants(worker: int, mark: str) -> None:
    """Kills a worker and its descendants; it must not be reaped yet, so that its pid is still its own."""
    _end_started_by(worker, mark)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)


def end_descendants(mark: str) -> None:
    """Kills the calling worker's descendants, and then the worker itself."""
    _end_started_by(os.getpid(), mark)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _end_started_by(worker: int, mark: str) -> None:
    """Stops all descendants first, until scans find no new one, so that a forking process cannot escape.

    One scan is not enough: the list of processes is no snapshot, and one that forks and ends while it is read
    hides its child. Nor is one signal: on a busy machine it arrives when the process is next scheduled, which
    may be in the middle of a fork.
    """
    found: set[int] = set()
    quiet_looks = 0
    deadline = time.monotonic() + MAX_SECONDS
    while quiet_looks < QUIET_LOOKS and time.monotonic() < deadline:
        new = _started_by(worker, mark) - found
        for pid in new:
            _send(pid, signal.SIGSTOP)
        found |= new
        quiet_looks = 0 if new or not all(map(_has_stopped, found)) else quiet_looks + 1
        time.sleep(LOOK_SECONDS)
    for pid in found:
        _send(pid, signal.SIGKILL)


def _started_by(worker: int, mark: str) -> set[int]:
    living = {process.pid: process for process in _living()}
    wanted = {pid for pid, p in living.items() if worker in (pid, p.group, p.session) or _has_mark(pid, mark)}
    new = wanted | {worker}
    while new:
        new = {pid for pid, process in living.items() if process.parent in new} - wanted
        wanted |= new
    return wanted - {os.getpid()}


def _living() -> list[Process]:
    processes = []
    for entry in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent, group, session = _stat(entry)
            if state not in "ZX":
                processes.append(Process(int(entry.name), int(parent), int(group), int(session)))
    return processes


def _has_stopped(pid: int) -> bool:
    try:
        return _stat(PROC / str(pid))[0] in "TtZX"
    except (OSError, IndexError):
        return True


def _stat(entry: Path) -> list[str]:
    """Returns state, parent, process group and session of a process."""
    return (entry / "stat").read_text().rpartition(")")[2].split()[:4]


def _has_mark(pid: int, mark: str) -> bool:
    with contextlib.suppress(OSError):
        return f"{MARK}={mark}".encode() in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    return False


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
