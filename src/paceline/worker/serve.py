"""What a worker does in its process, whoever started it."""

import importlib

from paceline.worker.host import Host
from paceline.worker.receive import WeightsReceiver
from paceline.worker.wire import Connection


def serve(connection: Connection, weights: WeightsReceiver, factory: str) -> None:
    """Hosts the backend that `module:function` makes of the settings in the client's first message."""
    settings = connection.receive().fields["settings"]
    module, _, function = factory.partition(":")
    backend = getattr(importlib.import_module(module), function)(settings)
    Host(backend, connection, weights).serve()
