"""The command line in a forked process: starts in milliseconds, because everything is imported already.

What happens to it (signals, limits, patched functions) leaves the test's own process alone.
"""

import contextlib
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

import paceline.loop  # noqa: F401 - what a run needs, imported before the first fork
from paceline.cli.main import main
from paceline.runs.interruption import SIGNALS
from paceline.tasks.running_sums import RunningSums
from tests.length_reward import pay_for_length

# Otherwise the library warns in every child of a process that has used its threads.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class ForkedCommand:
    """`paceline ARGUMENTS...` in a child of this process, with a reward that an untrained policy can earn."""

    def __init__(self, arguments: list[str], prepare: Callable[[], None] = lambda: None) -> None:
        self.code: int | None = None
        self.printed = b""
        # Not a file: what limits the files of a run would limit that, too.
        self.output, output = os.pipe()
        os.set_blocking(self.output, False)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(arguments, output, prepare)
        os.close(output)

    def send(self, number: int) -> None:
        """Sends a signal, if the process still lives."""
        if self.code is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float = 600.0) -> int:
        """Returns the exit code, negative where a signal ended it."""
        deadline = time.monotonic() + seconds
        while self.code is None:
            self._read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self.code = -signal.SIGKILL
                raise TimeoutError(f"no end after {seconds:g} s:\n{self.text()}")
            else:
                time.sleep(0.005)
        self._read()
        if self.output >= 0:
            os.close(self.output)
            self.output = -1
        return self.code

    def text(self) -> str:
        """Returns what it has printed."""
        self._read()
        return self.printed.decode(errors="replace")

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.output >= 0 and (data := os.read(self.output, 1 << 16)):
                self.printed += data


def _become(arguments: list[str], output: int, prepare: Callable[[], None]) -> None:
    code = 1
    try:
        try:
            gc.freeze()  # what other tests left is not for this process to end: it has none of their threads
            for stream in (1, 2):
                os.dup2(output, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115, PTH123
            sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # noqa: SIM115, PTH123
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            RunningSums.score = pay_for_length
            sys.argv = ["paceline", *arguments]
            prepare()
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        # Whatever happens on the way (a late SIGINT, a terminal that is gone): no second process of pytest.
        os._exit(code)
