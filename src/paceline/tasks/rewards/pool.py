"""Worker processes for reward functions and tools; one that exceeds its time limit or dies is replaced.

    submit ──▶ queue ──▶ one thread per worker ──connection──▶ worker process (worker.py)

The time limit of a call is its target's: the recipe sets it for each reward (`task.rewards[].time_limit`) and
for the tool (`task.turns.time_limit`), 10 seconds by default. A thread cannot be stopped in Python, a process
can: so a function that never returns costs its time limit and one process start, and nothing else. Its
imports do not count. Workers are fresh interpreters (no fork, and no second run of the caller's
script), each with a limit of memory; what they print goes to a log (`output.py`), and what they have started
ends with them (`processes.py`).
"""

import contextlib
import logging
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.tasks.rewards.channel import Channel
from paceline.tasks.rewards.functions import Failed, Target
from paceline.tasks.rewards.output import WorkerOutput
from paceline.tasks.rewards.processes import MARK, end_with_descendants
from paceline.tasks.rewards.worker import (
    IMPORT_LIMIT_SECONDS,
    PARENTS_SIGNALS,
    Importing,
    LoadError,
    Ready,
    Step,
)

# The reply to a call that is pending when the run ends.
ENDED = Failed("died", "the run ended")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A call that waits for a worker."""

    index: int  # of the target
    arguments: Any
    future: "Future[Any]"


class WorkerPool:
    """Calls `targets` by index; a future's result is the worker's reply or `Failed`, and it never raises."""

    def __init__(self, targets: Sequence[Target | Step], size: int, memory_gb: float = 0.0) -> None:
        """Makes a pool of up to `size` workers, each limited to `memory_gb`; 0: no limit."""
        self.targets = list(targets)
        self.size = size
        self.threads = 0
        self.state = _State(round(memory_gb * 1e9))
        # The threads hold only `state`, so a pool without references is closed, as it is at interpreter exit.
        self.close = weakref.finalize(self, self.state.close)

    def load_targets(self) -> Ready:
        """Starts a worker that loads every target; raises ValueError where one cannot be loaded."""
        worker = Worker(self.targets, self.state.output, self.state.memory_bytes)
        self.state.register(worker)
        self.state.spare.append(worker)
        return worker.ready

    def submit(self, index: int, arguments: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self.state.enqueue(Job(index, arguments, future))
        if self.threads < self.size:
            self.threads += 1
            threading.Thread(
                target=_serve, args=(self.state, self.targets), name="rewards", daemon=True
            ).start()
        return future


class _State:
    """State shared by the pool and its threads: queued jobs, running workers, and their output."""

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.output = WorkerOutput()
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.spare: list[Worker] = []  # started, not yet with a thread
        self.alive: set[Worker] = set()
        self.lock = threading.Lock()
        self.closed = False

    def enqueue(self, job: Job) -> None:
        with self.lock:
            if not self.closed:
                self.jobs.put(job)
                return
        job.future.set_result(ENDED)

    def register(self, worker: "Worker") -> None:
        with self.lock:
            if self.closed:
                worker.kill()
            self.alive.add(worker)

    def discard(self, worker: "Worker") -> None:
        worker.kill()
        with self.lock:
            self.alive.discard(worker)

    def close(self) -> None:
        with self.lock:
            self.closed = True
            workers = list(self.alive)
            self.alive.clear()
        for worker in workers:
            worker.kill()
        self.output.close()
        with contextlib.suppress(queue.Empty):
            while (job := self.jobs.get_nowait()) is not None:
                job.future.set_result(ENDED)
        self.jobs.put(None)


def _serve(state: _State, targets: list[Target | Step]) -> None:
    worker: Worker | None = None
    while (job := state.jobs.get()) is not None and not state.closed:
        try:
            if worker is None:
                with contextlib.suppress(IndexError):
                    worker = state.spare.pop()
            if worker is None:
                worker = Worker(targets, state.output, state.memory_bytes)
                state.register(worker)
            reply = worker.call(job.index, job.arguments, targets[job.index].time_limit)
        except Exception as error:  # it could not be started, or the arguments cannot be sent
            reply = Failed("died", f"{type(error).__name__}: {error}")
        if isinstance(reply, Failed) and reply.reason != "error" and worker is not None:
            state.discard(worker)
            worker = None
        job.future.set_result(reply)
    if job is not None:
        job.future.set_result(ENDED)
    state.jobs.put(None)  # for the next thread


class Worker:
    """A worker process, seen from the parent."""

    def __init__(self, targets: Sequence[Target | Step], output: WorkerOutput, memory_bytes: int) -> None:
        self.mark = secrets.token_hex(16)
        self.calls = 0
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = self._start(theirs.fileno(), output.write_end, memory_bytes)
        self.channel = Channel(ours)
        self.ended = _watch_end(self.process.pid)
        if self.ended >= 0:
            weakref.finalize(self, os.close, self.ended)
        try:
            self.ready = self._load(targets)
        except BaseException:
            self.kill()
            raise

    def _start(self, descriptor: int, output: int, memory_bytes: int) -> "subprocess.Popen[bytes]":
        search_path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        environment = {**os.environ, "PYTHONPATH": search_path, MARK: self.mark}
        # There are several workers, and the policy needs the cores.
        environment.setdefault("OMP_NUM_THREADS", "1")
        arguments = f"{descriptor}, {os.getpid()}, {self.mark!r}, {memory_bytes}"
        # A scheduler's signal reaches every process, and the worker handles it only once `main` runs.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
        try:
            return subprocess.Popen(
                [sys.executable, "-c", f"from paceline.tasks.rewards.worker import main; main({arguments})"],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                # A group of its own: Ctrl-C is for the run to handle, and the whole group can be killed.
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    def _load(self, targets: Sequence[Target | Step]) -> Ready:
        try:
            self.channel.send(0, list(targets), IMPORT_LIMIT_SECONDS)
            reply = self._reply(0, IMPORT_LIMIT_SECONDS)
        except OSError:
            # Waits without reaping, so that the process's group can still be killed.
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            self.kill()
            status = self.process.returncode
            reply = LoadError(f"the worker process ended while importing (exit status {status})")
        if isinstance(reply, Failed):
            reply = LoadError(f"importing took longer than {IMPORT_LIMIT_SECONDS:.0f} s")
        if isinstance(reply, LoadError):
            raise ValueError(reply.message)
        return reply

    def call(self, index: int, arguments: Any, time_limit: float) -> Any:
        """Returns the worker's reply, or `Failed` after `time_limit` seconds; the caller then kills it."""
        self.calls += 1
        try:
            self.channel.send(self.calls, (index, arguments), time_limit)
            return self._reply(self.calls, time_limit)
        except TimeoutError:
            return Failed("timeout", f"did not take its arguments within {time_limit:g} s")
        except OSError:
            return Failed("died", "its process ended")

    def _reply(self, call: int, time_limit: float) -> Any:
        """Returns the worker's own reply to this call; any other message is a child's, or too late."""
        left = {False: time_limit, True: IMPORT_LIMIT_SECONDS}  # seconds, by whether it is importing
        importing = False
        while True:
            start = time.monotonic()
            message = self.channel.receive(left[importing], self.ended)
            if message is None:
                what = "importing, " if importing else ""
                return Failed("timeout", f"{what}no result after {time_limit:g} s")
            left[importing] -= time.monotonic() - start
            if message.sender != self.process.pid or message.call != call:
                continue
            if not isinstance(message.content, Importing):
                return message.content
            importing = message.content.begins

    def kill(self) -> None:
        if self.process.returncode is None:  # not reaped, so the group's number cannot be another's
            end_with_descendants(self.process.pid, self.mark)
            self.process.wait()  # channel and pidfd are closed with this object: a thread may still read them


def _watch_end(pid: int) -> int:
    """Returns a descriptor that becomes readable when the process ends; -1 where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return -1
