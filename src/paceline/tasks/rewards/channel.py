"""Messages between a pool and one of its workers, each with the number of its call and its sender.

    magic | call | sender's process id | length | pickled content

A reward may fork, and output of a child must never pass for a reply: the pool accepts only messages of the
pending call, from the process that it started. No call blocks beyond its timeout.
"""

import os
import pickle
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

HEADER = struct.Struct("!4sQQQ")
MAGIC = b"pace"

# Longest message that is sent or read: a tool's observation may be long, not endless.
MAX_BYTES = 1 << 28
CHUNK_BYTES = 1 << 20


class ChannelBroken(ConnectionError):
    """Raised when the other side is gone, or sent something that is not a message."""


class TooLong(ValueError):
    """Raised when the content to send exceeds `MAX_BYTES`."""


@dataclass(frozen=True)
class Message:
    """One message, with its call and sender."""

    call: int  # 0: before the first call
    sender: int
    content: Any


class Channel:
    """One end of a stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.buffer = bytearray()
        self.identity = self._identify()

    def send(self, call: int, content: Any, seconds: float | None = None) -> None:
        """Sends a message; raises TimeoutError where the other side does not read it in time."""
        if self._identify() != self.identity:
            raise ChannelBroken("its descriptor was closed, and is another file's now")
        payload = pickle.dumps(content)
        if len(payload) > MAX_BYTES:
            raise TooLong(f"{len(payload)} bytes are more than the {MAX_BYTES} that a message may have")
        self.socket.settimeout(seconds)
        self.socket.sendall(HEADER.pack(MAGIC, call, os.getpid(), len(payload)) + payload)

    def receive(self, seconds: float | None = None, other_end: int = -1) -> Message | None:
        """Returns the next message; None after `seconds` without a complete one.

        `other_end` is a descriptor that becomes readable when the sender has died, as a pidfd does: a child
        of it may hold the connection open. Raises `ChannelBroken` where no further message is possible.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while (message := self._take()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            self._read_some(left, other_end)
        return message

    def close(self) -> None:
        self.socket.close()

    def _take(self) -> Message | None:
        if len(self.buffer) < HEADER.size:
            return None
        magic, call, sender, length = HEADER.unpack_from(self.buffer)
        if magic != MAGIC or length > MAX_BYTES:
            raise ChannelBroken("what came is no message")
        end = HEADER.size + length
        if len(self.buffer) < end:
            return None
        try:
            content = pickle.loads(self.buffer[HEADER.size : end])
        except Exception as error:
            raise ChannelBroken(f"what came cannot be read: {error}") from None
        del self.buffer[:end]
        return Message(call, sender, content)

    def _read_some(self, seconds: float | None, other_end: int) -> None:
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        if other_end >= 0:
            poll.register(other_end, select.POLLIN)
        ready = dict(poll.poll(None if seconds is None else max(1, round(1000 * seconds))))
        if self.socket.fileno() in ready:
            data = self.socket.recv(CHUNK_BYTES)
            if not data:
                raise ChannelBroken("the other side has closed the connection")
            self.buffer += data
        elif other_end in ready:
            raise ChannelBroken("the other side has ended")

    def _identify(self) -> tuple[int, int]:
        try:
            status = os.fstat(self.socket.fileno())
        except OSError as error:
            raise ChannelBroken(f"its descriptor is closed: {error}") from None
        return status.st_dev, status.st_ino
