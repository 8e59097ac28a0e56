"""Worker processes for reward functions and tools: reused while they behave, killed and replaced when they do
not.

    submit ──▶ queue ──▶ one thread per worker ──connection──▶ worker process (worker.py)

A thread cannot be stopped in Python, a process can: that is why a function that never returns costs its time
limit and one process start, and nothing else. Workers are fresh interpreters (no fork, and no second run of
the caller's script).
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
from typing import Any

from paceline.tasks.rewards.functions import Failed, Target
from paceline.tasks.rewards.worker import LoadError, Ready, Step

START_LIMIT = 300.0  # seconds for a worker to import what it needs
ENDED = Failed("died", "the run ended")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    index: int  # of the target
    arguments: Any
    future: "Future[Any]"


class WorkerPool:
    """Calls `targets` by their index; a future's result is what the worker replied, or `Failed`. It never
    raises.
    """

    def __init__(self, targets: Sequence[Target | Step], size: int) -> None:
        self.targets = list(targets)
        self.size = size
        self.threads = 0
        self.state = _State()
        # The threads know only `state`, so a pool that nobody holds any more is closed; so is one at
        # interpreter exit.
        self.close = weakref.finalize(self, self.state.close)

    def check(self) -> Ready:
        """Starts a worker to see whether every target can be loaded; raises ValueError where one cannot."""
        worker = Worker(self.targets)
        self.state.adopt(worker)
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
    """What the pool and its threads share."""

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

    def adopt(self, worker: "Worker") -> None:
        with self.lock:
            if self.closed:
                worker.kill()
            self.alive.add(worker)

    def bury(self, worker: "Worker") -> None:
        worker.kill()
        with self.lock:
            self.alive.discard(worker)

    def close(self) -> None:
        with self.lock:
            self.closed = True
            workers, self.alive = list(self.alive), set()
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
                state.adopt(worker)
            reply = worker.call(job.index, job.arguments, targets[job.index].time_limit)
        except Exception as error:  # it could not be started, or the arguments cannot be sent
            reply = Failed("died", f"{type(error).__name__}: {error}")
        if isinstance(reply, Failed) and reply.reason != "error" and worker is not None:
            state.bury(worker)
            worker = None
        job.future.set_result(reply)
    if job is not None:
        job.future.set_result(ENDED)
    state.jobs.put(None)  # for the next thread


class Worker:
    def __init__(self, targets: Sequence[Target | Step]) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}  # noqa: PTH109
        environment.setdefault("OMP_NUM_THREADS", "1")  # several workers, and a policy that wants the cores
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from paceline.tasks.rewards.worker import main; main({theirs.fileno()}, {os.getpid()})",
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
            # a group of its own: Ctrl-C is for the run to handle, and the whole group can be killed
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
                if self.connection.poll(START_LIMIT)
                else LoadError(f"importing took longer than {START_LIMIT:.0f} s")
            )
        except (EOFError, ConnectionError):
            os.waitid(
                os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT
            )  # not yet reaped: its group can still be killed
            self.kill()
            reply = LoadError(
                f"the worker process ended while importing (exit status {self.process.returncode})"
            )
        if isinstance(reply, LoadError):
            raise ValueError(reply.message)
        return reply

    def call(self, index: int, arguments: Any, time_limit: float) -> Any:
        try:
            self.connection.send((index, arguments))
            if not self.connection.poll(time_limit):
                return Failed("timeout", f"no result after {time_limit:g} s")
            return self.connection.recv()
        except (EOFError, OSError):
            return Failed("died", "its process ended")

    def kill(self) -> None:
        if (
            self.process.returncode is None
        ):  # not yet waited for, so the group's number cannot be somebody else's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()  # the connection is closed with this object: a thread may still be reading it
