"""Ports for servers that a test starts."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Returns a free port, below those that a system gives to whoever asks for any.

    So nobody else takes it before the server listens, and no client that comes earlier connects to itself.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
