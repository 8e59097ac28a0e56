"""What workers print: collected, and written to the run's `rewards.log` instead of into its progress table.

    worker's stdout and stderr ──pipe──▶ a thread ──▶ held until the target is known; then the log or stderr

The log keeps the newest output: at `MAX_LOG_BYTES` it becomes `rewards.log.1` and a new one begins. A
log that cannot be written does not stop a run.
"""

import contextlib
import os
import sys
import threading
from collections import deque
from pathlib import Path

MAX_LOG_BYTES = 16 << 20
MAX_HELD_CHUNKS = 64
CHUNK_BYTES = 1 << 16

# Seconds that closing waits for the last output; a process that left its worker may hold the pipe open.
CLOSE_SECONDS = 1.0


class WorkerOutput:
    """The pipe that a pool's workers write to, and the thread that reads it."""

    def __init__(self) -> None:
        read_end, self.write_end = os.pipe()
        self._lock = threading.Lock()
        self._held: deque[bytes] = deque(maxlen=MAX_HELD_CHUNKS)
        self._log: Path | None = None
        self._to_stderr = False
        self._thread = threading.Thread(
            target=self._read, args=(read_end,), name="reward-output", daemon=True
        )
        self._thread.start()

    def to_log(self, path: Path) -> None:
        """Writes held and later output to this file."""
        with self._lock:
            self._log = path
            self._release()

    def to_stderr(self) -> None:
        with self._lock:
            self._to_stderr = True
            self._release()

    def close(self) -> None:
        """Reads the remaining output of the ended workers; without a log it goes to stderr."""
        if self.write_end < 0:
            return
        os.close(self.write_end)
        self.write_end = -1
        self._thread.join(CLOSE_SECONDS)
        if self._log is None:
            self.to_stderr()

    def _read(self, read_end: int) -> None:
        while data := os.read(read_end, CHUNK_BYTES):
            with self._lock:
                self._held.append(data)
                if self._log is not None or self._to_stderr:
                    self._release()
        os.close(read_end)

    def _release(self) -> None:
        data = b"".join(self._held)
        self._held.clear()
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if self._log is not None:
                self._append(self._log, data)
            elif data:
                sys.stderr.write(data.decode(errors="replace"))
                sys.stderr.flush()

    @staticmethod
    def _append(log: Path, data: bytes) -> None:
        if not data:
            return
        if log.exists() and log.stat().st_size + len(data) > MAX_LOG_BYTES:
            os.replace(log, log.with_name(f"{log.name}.1"))
        with log.open("ab") as file:
            file.write(data)
