"""One worker process as its pool sees it: started, given requests, watched and replaced.

    pool.next_requests() ──feeder thread──▶ worker ──reader thread──▶ pool.completed()
                                              ✗ killed or hung
                    pool.lost() ◀─────────────┴──▶ another worker, with the newest weights

A worker that dies, or does not answer a ping in time, is replaced, and the pool gets its requests back. One
that cannot be replaced has failed, and another replica continues without it.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.types import Completion, Request
from paceline.worker.codec import read_answer, read_completion, submit_messages
from paceline.worker.process import Launch, Place, Worker, WorkerFailed, WorkerKilled, killing_after
from paceline.worker.readers import Weights
from paceline.worker.wire import Disconnected, Message


@dataclass(frozen=True)
class Patience:
    """How long a client waits, in seconds, and how often it tries."""

    start: float = 600.0  # for a worker to load its model
    answer: float = 120.0  # for a ping: longer than any step, captures and compilations included
    beat: float = 2.0  # between pings
    close: float = 5.0
    restarts: int = 3  # in a row, without anything finished between them


@dataclass(frozen=True)
class Setup:
    """What the workers of a pool are started with."""

    launch: Launch
    weights: Weights
    warn: Callable[[str], None]
    patience: Patience
    cure: str  # what to do about a worker that does not start


@dataclass
class Restored:
    """What a replacement worker is told, beside the newest weights."""

    fell_back: bool = False
    published: Message | None = None  # the newest head
    pacing: dict[str, Any] | None = None  # what all replicas have learnt
    asleep: bool = False


class Pool(Protocol):
    """The owner of several clients: called on every event at once, from a thread of the client."""

    changed: threading.Condition  # guards the state of every client
    aborted: set[str]  # requests that are to be aborted and have not ended
    restored: Restored
    closed: bool

    def next_requests(self, client: "WorkerClient") -> list[Request]:
        """Waits for requests for this client and records them with it; empty: the pool is closed."""

    def completed(self, client: "WorkerClient", completion: Completion) -> None:
        """Receives a completion."""

    def lost(self, client: "WorkerClient") -> None:
        """Takes the requests of a lost worker back."""

    def changed_state(self) -> None:
        """Called when a worker is up to date and accepts requests."""

    def failed(self, client: "WorkerClient", failure: WorkerFailed) -> None:
        """Called when a worker is lost for good."""


@dataclass(eq=False)
class WorkerClient:
    """The client of one worker, which it starts, watches and replaces; the pool's lock guards its fields."""

    number: int
    pool: Pool
    capacity: int  # requests that the worker is given at a time
    place: Place
    setup: Setup
    outstanding: dict[str, Request] = field(default_factory=dict)
    description: dict[str, Any] = field(default_factory=dict)
    ready: bool = False
    restarts: int = 0  # in all
    failure: WorkerFailed | None = None
    worker: Worker | None = None

    def __post_init__(self) -> None:
        self.changed = self.pool.changed
        self.warn = self.setup.warn
        self.patience = self.setup.patience
        self.weights = self.setup.weights
        self.answers: dict[int, Message | None] = {}  # by pending call; None: no answer yet
        self._calls = itertools.count(1)
        self._tries = 0  # since the last completion
        self._generation = 0
        self._starts = True  # a worker that loads its model has a timeout of its own
        self._starter = threading.current_thread()
        self._greeting = 0  # the call whose answer means that a new worker is up to date
        self._last_answer = time.monotonic()
        self._catching_up = False  # a new worker reads the weights
        self._threads: list[threading.Thread] = []

    @property
    def trains(self) -> bool:
        """Whether it can train its drafter; one without memory for that generates all the same."""
        return bool(self.description.get("trains"))

    def start(self) -> None:
        """Starts the first worker; returns when it has loaded its model."""
        try:
            self._begin_first()
        except BaseException:
            self.worker = None
            raise
        for run in (self._feed, self._ping, self._watch):
            self._begin_thread(run)

    def close(self) -> None:
        """Ends the worker and all threads; the pool is closed."""
        with self.changed:
            starts, worker = self._starts, self.worker
        if worker is None:
            return  # it has not started
        if starts:  # the thread that starts a worker ends it
            self._starter.join(self.patience.close)
        else:
            with contextlib.suppress(Disconnected):
                with killing_after(self.patience.close, worker):  # it may not read
                    worker.connection.send(Message("close"))
                worker.wait(self.patience.close)
        worker.end()
        # A thread that is still running at interpreter exit is stopped wherever it is.
        for thread in self._threads:
            if thread not in (threading.current_thread(), self._starter if starts else None):
                thread.join(self.patience.close)

    # -- calls ------------------------------------------------------------------------------------

    def ask(self, message: Message) -> Message | None:
        """Calls the worker once; None if there is no worker or it is lost before it answers."""
        with self.changed:
            self._check()
            if not self.ready:
                return None
            number = next(self._calls)
            self.answers[number] = None
            worker, generation = self.worker, self._generation
        self._send(worker, Message(message.kind, message.fields, message.arrays, number))
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    self.answers[number] is not None
                    or generation != self._generation
                    or not self.ready
                    or self.failure is not None
                    or self.pool.closed
                )
            )
            self._check()
            answer = self.answers.pop(number)
        if answer is not None and answer.kind == "description":
            self.description = answer.fields
        return None if answer is None else read_answer(answer)

    def call(self, message: Message) -> Message:
        """Calls the worker and returns its answer; tries again if it is replaced meanwhile."""
        while (answer := self.ask(message)) is None:
            with self.changed:
                self.changed.wait_for(lambda: self.ready or self.failure is not None or self.pool.closed)
        return answer

    def submit(self, requests: Sequence[Request], worker: Worker | None) -> None:
        """Sends requests to the worker that they were taken for; another one must not have them twice."""
        for message in submit_messages(requests):
            self._send(worker, message)

    def tell_to_abort(self, ids: Collection[str]) -> None:
        """Aborts requests that the worker was given, if it is there."""
        with self.changed:
            ready, worker = self.ready, self.worker
        if ready and ids:
            self._send(worker, Message("abort", {"ids": sorted(ids)}))

    def _send(self, worker: Worker | None, message: Message) -> None:
        """Sends; if the worker is gone, its reader replaces it, and the pool has its requests again."""
        assert worker is not None
        with contextlib.suppress(Disconnected):
            worker.connection.send(message)

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.pool.closed:
            raise WorkerFailed("this backend is closed")

    # -- the worker -------------------------------------------------------------------------------

    def _begin_first(self) -> None:
        """Starts the first worker; one that is killed while it loads is replaced, one that fails is not."""
        while True:
            try:
                self._begin()
                return
            except WorkerKilled as problem:
                self._tries += 1
                if self._tries > self.patience.restarts:
                    raise
                self.restarts += 1
                self.warn(f"{problem}. Another one is started")

    def _begin(self) -> None:
        """Starts a worker, waits for its hello, restores its state, and starts its reader."""
        worker = self.place(self.setup.launch, self.weights)
        with self.changed:
            self.worker = worker
        if self.pool.closed:
            worker.end()  # `close` may have looked before it was there
            return
        began = time.monotonic()
        try:
            with killing_after(self.patience.start, worker):
                self.description = worker.connection.receive().fields
        except Disconnected:
            code = worker.end(self.patience.close)
            was_killed = code < 0 and time.monotonic() - began < self.patience.start
            raise (WorkerKilled if was_killed else WorkerFailed)(
                f"the process that generates ended with code {code} before it was ready; what it said is "
                f"above. {self.setup.cure}"
            ) from None
        self.weights.begin_reading()
        with self.changed:
            self._generation += 1
            self._starts = False
            self._last_answer = time.monotonic()
            self._greeting = next(self._calls)
            self._catching_up = True
        messages = self.restored_messages()  # ranks may have to answer first
        self._begin_thread(self._read, worker)
        for message in (*messages, Message("ping", call=self._greeting)):
            self._send(worker, message)

    def _begin_thread(self, run: Callable[..., None], *arguments: Worker) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        thread.start()
        with self.changed:
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def restored_messages(self) -> list[Message]:
        """Returns the state to restore in a new worker: precision, weights, the head, pacing, sleep."""
        state = self.pool.restored
        messages = [Message("fall_back")] if state.fell_back else []
        if self.weights.version is not None:
            assert self.worker is not None
            stale = self.weights.changed_in_place()
            notice = {} if stale else self.weights.notices([str(self.worker.id)])[0]
            messages.append(Message("await_weights" if stale else "update_weights", notice))
        if state.published is not None:
            messages.append(state.published)
        if state.pacing is not None:
            messages.append(Message("load_pacing", {"state": state.pacing}))
        if state.asleep:
            messages.append(Message("sleep"))
        return messages

    def _end_catching_up(self) -> None:
        if self._catching_up:
            self._catching_up = False
            self.weights.end_reading()

    def _feed(self) -> None:
        """Sends requests as there is room; a worker that does not read delays only itself."""
        while True:
            with self.changed:
                requests = self.pool.next_requests(self)
                worker = self.worker
            if not requests:
                return
            self.submit(requests, worker)
            with self.changed:  # they may have been aborted before the worker had them
                late = self.pool.aborted & {request.id for request in requests}
            self.tell_to_abort(late)

    def _read(self, worker: Worker) -> None:
        """Receives what a worker sends; replaces the worker when it is gone."""
        try:
            while True:
                message = worker.connection.receive()
                self._last_answer = time.monotonic()
                if message.kind == "completion":
                    self._arrive(message)
                    continue
                with self.changed:
                    if message.call == self._greeting:
                        # A waiting writer then hands the next weights to the workers that are ready.
                        self.ready = True
                        self._end_catching_up()
                        self.pool.changed_state()
                    elif message.call in self.answers:
                        self.answers[message.call] = message
                        self.changed.notify_all()
        except Disconnected as reason:
            self._replace(worker, str(reason))
        except Exception as error:  # re-raised in the waiting caller
            self._fail(WorkerFailed(f"what the process that generates sent cannot be used: {error!r}"))

    def _arrive(self, message: Message) -> None:
        request = self.outstanding.get(message.fields["id"])
        if request is not None:
            completion = read_completion(message, request)
            self._tries = 0
            self.pool.completed(self, completion)

    def _replace(self, worker: Worker, reason: str) -> None:
        with self.changed:
            if self.pool.closed:
                return
            self.ready = False
            self._end_catching_up()
            self._starts = True
            self._starter = threading.current_thread()
            self._tries += 1
            self.restarts += 1
            count = len(self.outstanding)
            self.pool.lost(self)
        code = worker.end()
        self.warn(
            f"the process that generates is gone (code {code}); another one takes over {count} requests"
        )
        failure = WorkerFailed(
            f"the process that generates ended {self._tries} times in a row without finishing anything, "
            f"last with code {code} ({reason}); what it said is above"
        )
        while self._tries <= self.patience.restarts:
            try:
                self._begin()
                return
            except WorkerFailed as problem:  # it was lost while starting
                failure = problem
                self._tries += 1
            if self.pool.closed:
                return
        self._fail(failure)

    def _fail(self, failure: WorkerFailed) -> None:
        with self.changed:
            self.ready = False
            self.failure = failure
            self._end_catching_up()
            self.pool.lost(self)
        self.pool.failed(self, failure)

    def _beats(self) -> Iterator[Worker]:
        """Yields the worker at every heartbeat while it is up, until the client closes."""
        while not self.pool.closed and self.failure is None:
            with self.changed:
                self.changed.wait_for(lambda: self.pool.closed, self.patience.beat)
                worker, starts = self.worker, self._starts
            if worker is not None and not starts and not self.pool.closed:
                yield worker

    def _ping(self) -> None:
        """Pings the worker; blocks while the worker does not read, so another thread watches."""
        for worker in self._beats():
            self._send(worker, Message("ping", call=next(self._calls)))

    def _watch(self) -> None:
        for worker in self._beats():
            silent = time.monotonic() - self._last_answer
            if silent > self.patience.answer:
                self.warn(f"the process that generates has not answered for {silent:.0f} s and is killed")
                worker.kill()
                self._last_answer = time.monotonic()
