"""One worker process: started with a socket and the weights' memory, ended for good when asked."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.worker.readers import Weights
from paceline.worker.wire import Connection, Disconnected, Message

# Where a peer is gone, torch's C++ warns with fifty lines of stack; the error that follows names the peer.
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


class WorkerFailed(RuntimeError):
    """The worker cannot be made to work; the message says what to do."""


class WorkerKilled(WorkerFailed):
    """The process was killed while it started; another one may start."""


@dataclass(frozen=True)
class Launch:
    """What a worker process hosts."""

    factory: str  # `module:function`, which makes a backend from the settings
    settings: str  # for the function; a recipe, for the backends of this project
    command: Sequence[str] = (sys.executable, "-m", "paceline.worker")  # what runs `worker/__main__.py`
    environment: Mapping[str, str] | None = None  # None: this process's own


class Worker(Protocol):
    """A running worker and the connection to it, wherever it runs."""

    connection: Connection

    @property
    def id(self) -> int:
        """The process id, on its own machine."""

    def kill(self) -> None:
        """Ends the process at once; a reader of its connection gets `Disconnected`."""

    def wait(self, seconds: float) -> bool:
        """Returns whether the process ended within `seconds`."""

    def end(self, seconds: float = 2.0) -> int:
        """Ends the process, by force after `seconds`; returns its exit code, -1: unknown."""


Place = Callable[[Launch, Weights], Worker]  # starts a worker


@contextlib.contextmanager
def killing_after(seconds: float, worker: Worker) -> Iterator[None]:
    """Kills the worker if the context takes longer: a caller that waits for it gets `Disconnected`."""
    timer = threading.Timer(seconds, worker.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


class WorkerProcess:
    """A `Worker` on this machine."""

    def __init__(
        self, launch: Launch, weights: Weights, environment: Mapping[str, str] | None = None
    ) -> None:
        """`environment` is added to this process's."""
        ours, theirs = socket.socketpair()
        with theirs:
            memory = weights.descriptor
            descriptors = (theirs.fileno(),) if memory is None else (theirs.fileno(), memory)
            arguments = (str(theirs.fileno()), "" if memory is None else str(memory), launch.factory)
            command = [*launch.command, *arguments]
            inherited = os.environ if launch.environment is None else launch.environment
            # A session of its own: Ctrl-C in the terminal is for the run, which then closes the worker.
            self.process = subprocess.Popen(
                command,
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**QUIET, **inherited, **(environment or {})},
            )
        self.connection = Connection(ours)
        with contextlib.suppress(Disconnected):  # the thread that waits for its hello finds out
            self.connection.send(Message("open", {"settings": launch.settings}))

    @property
    def id(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()

    def end(self, seconds: float = 2.0) -> int:
        self.connection.close()
        if not self.wait(seconds):
            self.process.kill()
        return self.process.wait()

    def wait(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True
