"""Worker processes for reward functions and tools; one that exceeds its time limit or dies is replaced.

    submit ──▶ queue ──▶ one thread per worker ──connection──▶ worker process (worker.py)

The time limit of a call is its target's: the recipe sets it for each reward (`task.rewards[].time_limit`) and
for the tool (`task.turns.time_limit`), 10 seconds by default. A thread cannot be stopped in Python, a process
can: so a function that never returns costs its time limit and one process start, and nothing else. Workers
are fresh interpreters (no fork, and no second run of the caller's script).
"""

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.tasks.rewards.functions import Failed, Target
from paceline.tasks.rewards.worker import LoadError, Ready, Step

# Seconds for a worker to import what it needs.
START_LIMIT_SECONDS = 300.0

# What a call gets that the end of the run cuts off.
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

    def __init__(self, targets: Sequence[Target | Step], size: int) -> None:
        self.targets = list(targets)
        self.size = size
        self.threads = 0
        self.state = _State()
        # The threads hold only `state`, so a pool without references is closed, as it is at interpreter exit.
        self.close = weakref.finalize(self, self.state.close)

    def load_targets(self) -> Ready:
        """Starts a worker to see whether every target can be loaded; raises ValueError where one cannot."""
        worker = Worker(self.targets)
        self.state.register(worker)
        self.state.spare.append(worker)
        return worker.ready

    def submit(self, index: int, arguments: Any) -> "Future[Any]":
        """Queues a call of the target with this index."""
        future: Future[Any] = Future()
        self.state.enqueue(Job(index, arguments, future))
        if self.threads < self.size:
            self.threads += 1
            threading.Thread(
                target=_serve, args=(self.state, self.targets), name="rewards", daemon=True
            ).start()
        return future


class _State:
    """What the pool and its threads share: queued jobs and running workers."""

    def __init__(self) -> None:
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
                worker = Worker(targets)
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

    def __init__(self, targets: Sequence[Target | Step]) -> None:
        ours, theirs = socket.socketpair()
        search_path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        environment = {**os.environ, "PYTHONPATH": search_path}
        # There are several workers, and the policy needs the cores.
        environment.setdefault("OMP_NUM_THREADS", "1")
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from paceline.tasks.rewards.worker import main; main({theirs.fileno()}, {os.getpid()})",
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
            # A group of its own: Ctrl-C is for the run to handle, and the whole group can be killed.
            start_new_session=True,
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        try:
            self.ready = self._load(targets)
        except BaseException:
            self.kill()
            raise

    def _load(self, targets: Sequence[Target | Step]) -> Ready:
        try:
            self.connection.send(list(targets))
            reply = (
                self.connection.recv()
                if self.connection.poll(START_LIMIT_SECONDS)
                else LoadError(f"importing took longer than {START_LIMIT_SECONDS:.0f} s")
            )
        except (EOFError, ConnectionError):
            # Waits without reaping, so that the process's group can still be killed.
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            self.kill()
            reply = LoadError(
                f"the worker process ended while importing (exit status {self.process.returncode})"
            )
        if isinstance(reply, LoadError):
            raise ValueError(reply.message)
        return reply

    def call(self, index: int, arguments: Any, time_limit: float) -> Any:
        """Returns the worker's reply, or `Failed` after `time_limit` seconds; the caller then kills it."""
        try:
            self.connection.send((index, arguments))
            if not self.connection.poll(time_limit):
                return Failed("timeout", f"no result after {time_limit:g} s")
            return self.connection.recv()
        except (EOFError, OSError):
            return Failed("died", "its process ended")

    def kill(self) -> None:
        """Kills the process with everything it has started."""
        if self.process.returncode is None:  # not reaped, so the group's number cannot be another's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()  # the connection is closed with this object: a thread may still be reading it
