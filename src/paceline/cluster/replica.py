"""One replica of the pool: a worker's client, what it was given, and the thread that feeds it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from paceline.types import Completion, Request
from paceline.worker.client import Patience, WorkerBackend
from paceline.worker.process import Launch, Worker, WorkerFailed
from paceline.worker.readers import Weights

Place = Callable[[Launch, Weights], Worker]


class Pool(Protocol):
    """The pool, as its replicas see it."""

    aborted: set[str]  # requests that are to be aborted and have not ended

    def completed(self, replica: "Replica", completion: Completion) -> None:
        """Receives a completion."""

    def lost(self, replica: "Replica", requests: list[Request]) -> None:
        """Receives the unfinished requests of a lost worker."""

    def changed_state(self) -> None:
        """Called when a replica becomes ready or is lost."""

    def failed(self, replica: "Replica", failure: WorkerFailed) -> None:
        """Called when a replica is lost for good."""

    def next_requests(self, replica: "Replica") -> list[Request]:
        """Waits for requests for this replica; empty: the pool is closed."""


@dataclass(eq=False)
class Replica:
    """A worker's client and what it was given; the pool's lock guards `outstanding`."""

    number: int
    pool: Pool
    capacity: int
    outstanding: dict[str, Request] = field(default_factory=dict)
    gone: bool = False  # for good
    client: WorkerBackend | None = None
    _feeder: threading.Thread | None = None

    def start(
        self,
        launch: Launch,
        place: Place,
        memory: Weights,
        warn: Callable[[str], None],
        patience: Patience,
    ) -> None:
        self.client = WorkerBackend(
            launch,
            list,
            lambda message: warn(f"replica {self.number}: {message}"),
            patience,
            place,
            memory,
            _Events(self),
        )
        self._feeder = threading.Thread(target=self._feed, daemon=True)
        self._feeder.start()
        self.pool.changed_state()

    def close(self) -> None:
        """Ends the worker and its feeder thread; the pool is closed."""
        if self.client is not None:
            self.client.close()
            if self._feeder is not None:
                self._feeder.join(self.client.patience.close)

    @property
    def is_ready(self) -> bool:
        return not self.gone and self.client is not None and self.client.ready

    @property
    def trains(self) -> bool:
        """Whether it can train its drafter; one without memory for that generates all the same."""
        return self.client is not None and self.client.description.get("trains", False)

    def _feed(self) -> None:
        """Submits requests as there is room; a worker that does not read delays only itself."""
        assert self.client is not None
        while requests := self.pool.next_requests(self):
            try:
                self.client.submit(requests)
            except WorkerFailed:
                self.pool.lost(self, requests)
                return
            self.client.abort(self.pool.aborted & {request.id for request in requests})


class _Events:
    """Forwards a client's events to the pool."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    def completed(self, client: WorkerBackend, completion: Completion) -> None:
        self.replica.pool.completed(self.replica, completion)

    def lost(self, client: WorkerBackend, requests: list[Request]) -> None:
        self.replica.pool.lost(self.replica, requests)

    def ready(self, client: WorkerBackend) -> None:
        self.replica.pool.changed_state()

    def failed(self, client: WorkerBackend, failure: WorkerFailed) -> None:
        self.replica.pool.failed(self.replica, failure)
