"""Messages between a worker and its client: a header in JSON and raw arrays behind it, nothing pickled.

    magic | protocol version | bytes of the header | bytes behind it | header | array 0 | array 1 | ...

The header names the kind, the call that it answers or asks for, plain fields, and type and shape of every
array. A version that is not ours, a length beyond the bounds and a type that is not listed are refused, so
that whatever the other side sends, nothing of it is executed.
"""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PROTOCOL = 2
MAGIC = b"pacw"
FRAME = struct.Struct("!4sHIQ")
MAX_HEADER_BYTES = 1 << 26
MAX_ARRAY_BYTES = 1 << 36
DTYPES = ("int32", "int64", "uint8", "bool", "float16", "float32", "float64")


class Disconnected(ConnectionError):
    """The other side is gone, or sent something that is no message of this protocol."""


@dataclass(frozen=True)
class Message:
    """One message: what it is about, plain fields, and arrays."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: Sequence[np.ndarray] = ()
    call: int = 0  # the number of the call that it belongs to; 0: none


class Connection:
    """One end of a stream socket; several threads may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Sends a message; blocks while the other side does not read, which bounds what is buffered."""
        arrays = [np.asarray(array, order="C") for array in message.arrays]
        header = json.dumps(
            {
                "kind": message.kind,
                "call": message.call,
                "fields": message.fields,
                "arrays": [[array.dtype.name, array.shape] for array in arrays],
            }
        ).encode()
        frame = FRAME.pack(MAGIC, PROTOCOL, len(header), sum(array.nbytes for array in arrays))
        try:
            with self._sending:
                self.socket.sendall(frame + header)
                for array in arrays:
                    self.socket.sendall(array.reshape(-1).view(np.uint8).data if array.size else b"")
        except OSError as error:
            raise Disconnected(str(error)) from None

    def receive(self) -> Message:
        """Returns the next message; raises `Disconnected` if the other side is gone."""
        magic, version, header_bytes, array_bytes = FRAME.unpack(self._read(FRAME.size))
        if magic != MAGIC or header_bytes > MAX_HEADER_BYTES or array_bytes > MAX_ARRAY_BYTES:
            raise Disconnected("what came is no message of a worker")
        if version != PROTOCOL:
            raise Disconnected(f"protocol version {version}, this is {PROTOCOL}: use one version of Paceline")
        try:
            header = json.loads(bytes(self._read(header_bytes)))
            arrays = [self._read_array(name, shape) for name, shape in header["arrays"]]
            return Message(header["kind"], header["fields"], arrays, header["call"])
        except (ValueError, KeyError, TypeError) as error:
            raise Disconnected(f"what came cannot be read: {error!r}") from None

    def close(self) -> None:
        """Closes this end; a thread that waits on it gets `Disconnected`."""
        with contextlib.suppress(OSError):  # the other side was quicker
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _read_array(self, name: str, shape: list[int]) -> np.ndarray:
        if name not in DTYPES:
            raise ValueError(f"arrays of {name}")
        array = np.empty(shape, dtype=name)
        if array.size:
            self._read_into(array.reshape(-1).view(np.uint8).data)
        return array

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        self._read_into(memoryview(data))
        return data

    def _read_into(self, view: memoryview) -> None:
        while view:
            try:
                count = self.socket.recv_into(view)
            except OSError as error:
                raise Disconnected(str(error)) from None
            if not count:
                raise Disconnected("the other side has closed the connection")
            view = view[count:]
