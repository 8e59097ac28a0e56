"""A worker started by another process, on any machine: it connects to its client and sends a secret.

    client   Listener ──address, secret──▶ the launcher ──▶ connect() ──▶ worker

The secret is for one connection and is compared before anything else is read, so that no other process on the
network can pose as the worker.
"""

import contextlib
import hmac
import secrets
import socket
import time
from collections.abc import Callable

from paceline.worker.wire import Connection

SECRET_BYTES = 32


class NobodyConnected(ConnectionError):
    """The worker did not connect in time."""


class Listener:
    """Waits for one worker to connect."""

    def __init__(self, host: str) -> None:
        self.server = socket.create_server((host, 0))
        self.address: tuple[str, int] = self.server.getsockname()[:2]
        self.secret = secrets.token_hex(SECRET_BYTES // 2)

    def accept(self, seconds: float, still_expected: Callable[[], bool] = lambda: True) -> Connection:
        """Returns the worker's connection; raises if it is no longer expected or does not connect in time."""
        deadline = time.monotonic() + seconds
        self.server.settimeout(0.2)
        with self.server:
            while time.monotonic() < deadline and still_expected():
                with contextlib.suppress(TimeoutError):
                    connection = self.server.accept()[0]
                    if self._knows_the_secret(connection):
                        connection.settimeout(None)
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        return Connection(connection)
                    connection.close()
        raise NobodyConnected(f"no worker connected to {self.address} within {seconds:.0f} s")

    def _knows_the_secret(self, connection: socket.socket) -> bool:
        connection.settimeout(5.0)
        said = b""
        with contextlib.suppress(OSError):
            while len(said) < SECRET_BYTES and (more := connection.recv(SECRET_BYTES - len(said))):
                said += more
        return hmac.compare_digest(said, self.secret.encode())


def connect(address: tuple[str, int], secret: str) -> Connection:
    connection = socket.create_connection(address, timeout=60)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(secret.encode())
    return Connection(connection)
