"""What a client of a worker is told: how patient to be, and who owns it beside others."""

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
    """Who has several clients: it hears of everything at once, from a thread of the client's."""

    def completed(self, client: "WorkerBackend", completion: Completion) -> None:
        """Takes a completion, which the client then does not keep."""

    def lost(self, client: "WorkerBackend", requests: list[Request]) -> None:
        """Takes the requests of a worker that is gone; another one is being started."""

    def ready(self, client: "WorkerBackend") -> None:
        """Hears that a worker is up to date and may be given requests."""

    def failed(self, client: "WorkerBackend", failure: WorkerFailed) -> None:
        """Hears that the worker is gone and not replaced."""
