"""Who has several clients of workers, as a client sees it."""

from typing import TYPE_CHECKING, Protocol

from paceline.types import Completion, Request
from paceline.worker.process import WorkerFailed

if TYPE_CHECKING:
    from paceline.worker.client import WorkerBackend


class Owner(Protocol):
    """Who has several clients: it hears of everything at once, from a thread of the client's."""

    def completed(self, client: "WorkerBackend", completion: Completion) -> None:
        """Takes a completion, which the client then does not keep."""

    def lost(self, client: "WorkerBackend", requests: list[Request]) -> None:
        """Takes the requests of a worker that is gone; another one is being started."""

    def ready(self, client: "WorkerBackend") -> None:
        """Hears that a worker is up to date and may be given requests."""

    def failed(self, client: "WorkerBackend", failure: WorkerFailed) -> None:
        """Hears that the worker is gone and not replaced."""
