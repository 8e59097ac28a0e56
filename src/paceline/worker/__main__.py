"""`python -m paceline.worker SOCKET WEIGHTS MODULE:FUNCTION`: hosts the backend that the function makes.

SOCKET and WEIGHTS are descriptors that the client handed down. The function is called with the settings that
the first message holds.
"""

import importlib
import signal
import socket
import sys

from paceline.worker.host import Host
from paceline.worker.weights import WeightsReader
from paceline.worker.wire import Connection


def main() -> None:
    """Serves until the client closes or goes; signals are the client's business."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    descriptor, weights, factory = sys.argv[1:]
    connection = Connection(socket.socket(fileno=int(descriptor)))
    settings = connection.receive().fields["settings"]
    module, _, function = factory.partition(":")
    backend = getattr(importlib.import_module(module), function)(settings)
    Host(backend, connection, WeightsReader(int(weights))).serve()


if __name__ == "__main__":
    main()
