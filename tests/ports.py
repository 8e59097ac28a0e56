"""Ports for servers that a test starts."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Returns a free port, below the system's range of ephemeral ports.

    So no other process gets it before the server listens, and no early client connects to itself.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
