"""The parent's side of `chat_worker.py`: one process for all templates, with limits on time and memory.

A process that exceeds either is killed, and the next call starts another. Requests and replies are JSON, so
no reply is executed.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Seconds that a request may take; a rendering takes less than a millisecond.
TIME_LIMIT_SECONDS = 10.0
# Seconds for the process to start.
START_LIMIT_SECONDS = 60.0
MEMORY_LIMIT_BYTES = 1 << 30
# Of a reply: the text that a worker may return, every character escaped, and a little.
MAX_REPLY_BYTES = 12 * (1 << 24) + 4096


class TemplateProcess:
    """Renders templates in a process of its own, one at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: _Running | None = None

    def render(
        self,
        source: str,
        variables: dict[str, Any],
        chats: list[Any],
        tools: list[Any],
        marks: tuple[str, str] | None = None,
    ) -> dict[str, Any]:
        """Returns the worker's reply: `texts`, one for each chat, or `error` (its kind) and `message`."""
        # Dates and other values of a problem file are passed to templates as text.
        try:
            asked = {
                "source": source,
                "variables": variables,
                "chats": chats,
                "tools": tools,
                "marks": marks,
            }
            request = json.dumps(asked, default=str).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return {"error": "failed", "message": f"{type(error).__name__}: {error}"}
        with self.lock:
            reply = self._exchange(request)
            # It may have been killed from outside, such as by the OOM killer: retry once.
            return self._exchange(request) if reply.get("error") == "died" else reply

    def _exchange(self, request: bytes) -> dict[str, Any]:
        try:
            if self.running is None:
                self.running = _Running()
            reply = self.running.exchange(request)
        except BaseException:  # an interrupted exchange would leave its reply for the next request
            self._end()
            raise
        if reply.get("error") in ("time", "memory", "died"):
            self._end()
        return reply

    def _end(self) -> None:
        running, self.running = self.running, None
        if running is not None:
            running.close()


@cache
def template_process() -> TemplateProcess:
    """Returns the shared process of this program; it starts with the first rendering."""
    return TemplateProcess()


class _Running:
    """A worker that has been started."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        search_path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        arguments = f"{theirs.fileno()}, {MEMORY_LIMIT_BYTES}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from paceline.tasks.chat_worker import main; main({arguments})"],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": search_path},
            # Ctrl-C is for the run to handle.
            start_new_session=True,
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.close = weakref.finalize(self, _kill, self.process, self.connection)
        reply = self._receive(START_LIMIT_SECONDS)
        if "error" in reply:
            self.close()
            raise RuntimeError(f"the process that renders chat templates did not start: {reply['message']}")

    def exchange(self, request: bytes) -> dict[str, Any]:
        try:
            self.connection.send_bytes(request)
        except OSError:
            return {"error": "died", "message": "its process ended"}
        return self._receive(TIME_LIMIT_SECONDS)

    def _receive(self, limit: float) -> dict[str, Any]:
        try:
            if not self.connection.poll(limit):
                return {"error": "time", "message": f"no result after {limit:g} s"}
            return json.loads(self.connection.recv_bytes(MAX_REPLY_BYTES))
        except (EOFError, OSError):
            return {"error": "died", "message": "its process ended"}


def _kill(process: "subprocess.Popen[bytes]", connection: Connection) -> None:
    process.kill()
    process.wait()
    with contextlib.suppress(OSError):
        connection.close()
