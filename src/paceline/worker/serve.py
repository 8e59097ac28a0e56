"""What a worker does in its process, however it was started."""

import importlib
from typing import Protocol

from paceline.backend import Backend
from paceline.worker.host import Host
from paceline.worker.receive import WeightsReceiver
from paceline.worker.wire import Connection


class Served(Protocol):
    """Serves a connection by itself, unlike a `Backend`, which a `Host` drives."""

    def serve(self, connection: Connection) -> None:
        """Answers until the other side closes."""


def serve(connection: Connection, weights: WeightsReceiver, factory: str) -> None:
    """Hosts what `module:function` makes of the settings in the client's first message."""
    settings = connection.receive().fields["settings"]
    module, _, function = factory.partition(":")
    made: Backend | Served = getattr(importlib.import_module(module), function)(settings)
    if isinstance(made, Backend):
        Host(made, connection, weights).serve()
    else:
        made.serve(connection)
