"""`python -m paceline.worker SOCKET WEIGHTS MODULE:FUNCTION`: hosts the backend that the function makes.

SOCKET and WEIGHTS are descriptors that the client handed down; the second may be empty. The function is
called with the settings that the first message holds.
"""

import os
import signal
import socket
import sys

from paceline.worker.receive import WeightsReceiver
from paceline.worker.serve import serve
from paceline.worker.wire import Connection, Disconnected


def main() -> None:
    """Serves until the client closes or dies; signals are left to the client."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    descriptor, weights, factory = sys.argv[1:]
    connection = Connection(socket.socket(fileno=int(descriptor)))
    try:
        serve(connection, WeightsReceiver(int(weights) if weights else None), factory)
    except Disconnected:
        os._exit(0)  # the client died while the model was being loaded, or a completion sent


if __name__ == "__main__":
    main()
