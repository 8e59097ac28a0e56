"""Settings of a worker's client: its timeouts, and the owner that it reports to."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.types import Completion, Request
from paceline.worker.process import WorkerFailed

if TYPE_CHECKING:
    from paceline.worker.client import WorkerBackend


@dataclass(frozen=True)
class Patience:
    """How long a client waits, in seconds, and how often it tries."""

    start: float = 600.0  # for a worker to load its model
    answer: float = 120.0  # for a ping: longer than any step, captures and compilations included
    beat: float = 2.0  # between pings
    close: float = 5.0
    restarts: int = 3  # in a row, without anything finished between them


class Owner(Protocol):
    """The owner of several clients: called on every event at once, from a thread of the client."""

    def completed(self, client: "WorkerBackend", completion: Completion) -> None:
        """Receives a completion, which the client then does not keep."""

    def lost(self, client: "WorkerBackend", requests: list[Request]) -> None:
        """Receives the unfinished requests of a lost worker; a replacement is being started."""

    def ready(self, client: "WorkerBackend") -> None:
        """Called when a worker is up to date and accepts requests."""

    def failed(self, client: "WorkerBackend", failure: WorkerFailed) -> None:
        """Called when the worker is lost for good and not replaced."""
