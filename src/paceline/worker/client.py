"""A drop-in `Backend` whose generator runs in a worker process.

    submit ──▶ outstanding ──▶ worker ──reader thread──▶ arrived ──▶ completions()
                   │             ✗ killed or hung
                   └────────▶ another worker: newest weights, every outstanding request again

The worker continues while the client does not read `completions`: finished requests wait in `arrived`, which
never holds more than was submitted. A request leaves `outstanding` when its completion arrives, so it ends
once, however often it was run. A worker that dies, or does not answer a ping in time, is replaced; requests
keep their seeds, so those under the same weights give the same tokens.
"""

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from paceline.backend import Backend, LowPrecision, Speculation
from paceline.stats import RolloutStats
from paceline.types import Completion, Precision, Request
from paceline.worker.capabilities import RemotePrecision, RemoteSpeculation
from paceline.worker.codec import read_answer, read_completion, read_stats, submit_messages
from paceline.worker.owner import Owner, Patience
from paceline.worker.process import (
    Launch,
    Worker,
    WorkerFailed,
    WorkerKilled,
    WorkerProcess,
    killing_after,
)
from paceline.worker.readers import Weights
from paceline.worker.weights import SharedWeights
from paceline.worker.wire import Disconnected, Message


class WorkerBackend(Backend):
    """The client of one worker, which it starts, watches and replaces."""

    gives_memory = False  # whether it sleeps while the policy learns, because they share a GPU
    # What to do about a worker that does not start.
    cure = "With a full GPU, lower rollout.kv_tokens; without a cure, use rollout.mode=partial"

    def __init__(
        self,
        launch: Launch,
        weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        warn: Callable[[str], None] = lambda message: None,
        patience: Patience | None = None,
        place: Callable[[Launch, Weights], Worker] = WorkerProcess,
        memory: Weights | None = None,
        owner: Owner | None = None,
    ) -> None:
        """`weights` returns the learner's own, for `update_weights` without any.

        `place` starts a worker; `memory` is shared with other clients, whose `owner` writes and closes it.
        """
        self.launch = launch
        self.place = place
        self.owner = owner
        self.own_weights = weights
        self.warn = warn
        self.patience = patience or Patience()
        self.changed = threading.Condition()
        self.outstanding: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.arrived: deque[Completion] = deque()
        self.answers: dict[int, Message | None] = {}  # by pending call; None: no answer yet
        self.calls = itertools.count(1)
        self.paused = False
        self.closed = False
        self.failure: WorkerFailed | None = None
        self.restarts = 0  # in all
        self._tries = 0  # since the last completion
        self._generation = 0
        self._starting = True  # a worker that loads its model has a timeout of its own
        self._starter = threading.current_thread()
        self._greeting = 0  # the call whose answer means that a new worker is up to date
        self._handed_in: set[str] = set()  # requests that it was given before that
        self.ready = False
        self._last_answer = time.monotonic()
        self.fell_back = False
        self.asleep = False
        self.published: Message | None = None
        self.description: dict = {}
        self.pacing: dict | None = None  # what all replicas have learnt, for a replacement worker
        self._owns_memory = owner is None
        self._catching_up = False  # a new worker reads the weights
        self._threads: list[threading.Thread] = []
        self.weights: Weights = memory or SharedWeights()
        self._begin_first()
        self._begin_thread(self._ping)
        self._begin_thread(self._watch)

    # -- the contract (backend.py) ----------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        with self.changed:
            self._check()
            self.outstanding.update({request.id: request for request in requests})
            ready, worker = self.ready, self.worker
        if ready:  # else the worker that is starting gets it
            for message in submit_messages(requests):
                self._send(worker, message)

    def completions(self) -> Iterator[Completion]:
        while True:
            with self.changed:
                while not (self.arrived or self.paused or not self.outstanding):
                    self._check()
                    self.changed.wait(0.1)
                if self.paused or not self.arrived:
                    return
                completion = self.arrived.popleft()
            yield completion

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = [name for name in request_ids if name in self.outstanding]
        if not ids:
            return
        with self.changed:
            self.aborted.update(ids)
            ready, worker = self.ready, self.worker
        if ready:
            self._send(worker, Message("abort", {"ids": ids}))

    def update_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        """Sends weights; returns when the worker generates with them."""
        with self.changed:
            self.changed.wait_for(lambda: self.ready or self.failure is not None or self.closed)
        self.weights.write(version, self.own_weights() if weights is None else weights)
        self.description = self.call(self._weights_message()).fields

    def pause(self) -> None:
        self.paused = True
        if self.changed.acquire(blocking=False):  # a signal handler may have interrupted the holder
            self.changed.notify_all()
            self.changed.release()

    def resume(self) -> None:
        self.paused = False

    def take_stats(self) -> RolloutStats:
        return read_stats(self.call(Message("take_stats")).fields["stats"])

    def sleep(self) -> None:
        self.asleep = True
        self.call(Message("sleep"))

    def wake(self) -> None:
        self.asleep = False
        self.call(Message("wake"))

    def close(self) -> None:
        with self.changed:
            if self.closed:
                return
            self.closed = True
            self.outstanding.clear()
            starting = self._starting
            self.changed.notify_all()
        if starting:  # the thread that starts a worker ends it
            self._starter.join(self.patience.close)
        else:
            with contextlib.suppress(Disconnected):
                with killing_after(self.patience.close, self.worker):  # it may not read
                    self.worker.connection.send(Message("close"))
                self.worker.wait(self.patience.close)
        self.worker.end()
        # A thread that is still running at interpreter exit is stopped wherever it is.
        for thread in self._threads:
            if thread not in (threading.current_thread(), self._starter if starting else None):
                thread.join(self.patience.close)
        if self._owns_memory:
            self.weights.close()

    @property
    def precision(self) -> Precision:
        return Precision(self.description["precision"])

    @property
    def speculation(self) -> Speculation | None:
        return RemoteSpeculation(self) if self.description["speculates"] else None

    @property
    def low_precision(self) -> LowPrecision | None:
        return RemotePrecision(self) if self.description["low_precision"] else None

    # -- calls ------------------------------------------------------------------------------------

    def call(self, message: Message) -> Message:
        """Calls the worker and returns its answer; retries if the worker is replaced meanwhile."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.ready or self.failure is not None or self.closed)
            answer = self.ask(message)
            if answer is not None:
                return answer

    def ask(self, message: Message) -> Message | None:
        """Calls the worker once; None if there is no worker or it is lost before it answers."""
        with self.changed:
            self._check()
            if not self.ready:
                return None
            number = next(self.calls)
            self.answers[number] = None
            worker, generation = self.worker, self._generation
        self._send(worker, Message(message.kind, message.fields, message.arrays, number))
        answer = self._wait_for(number, generation)
        return None if answer is None else read_answer(answer)

    def _wait_for(self, number: int, generation: int) -> Message | None:
        with self.changed:
            self.changed.wait_for(
                lambda: self.answers[number] is not None
                or generation != self._generation
                or not self.ready
                or self.failure is not None
                or self.closed
            )
            self._check()
            return self.answers.pop(number)

    def _send(self, worker: Worker, message: Message) -> None:
        """Sends; if the worker is gone, its reader replaces it and resubmits everything."""
        with contextlib.suppress(Disconnected):
            worker.connection.send(message)

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise WorkerFailed("this backend is closed")

    # -- the worker -------------------------------------------------------------------------------

    def _begin_first(self) -> None:
        """Starts the first worker; one that is killed while it loads is replaced, one that fails is not."""
        while True:
            try:
                self._begin(self.place(self.launch, self.weights))
                return
            except WorkerKilled as problem:
                self._tries += 1
                if self._tries > self.patience.restarts:
                    raise
                self.restarts += 1
                self.warn(f"{problem}. Another one is started")

    def _begin(self, worker: Worker) -> None:
        """Waits for a new worker's hello, restores its state, and starts its reader."""
        with self.changed:
            self.worker = worker
        if self.closed:
            worker.end()  # `close` may have looked before it was there
            return
        began = time.monotonic()
        try:
            with killing_after(self.patience.start, worker):
                self.description = worker.connection.receive().fields
        except Disconnected:
            code = worker.end()
            was_killed = code < 0 and time.monotonic() - began < self.patience.start
            raise (WorkerKilled if was_killed else WorkerFailed)(
                f"the process that generates ended with code {code} before it was ready; what it said is "
                f"above. {self.cure}"
            ) from None
        with self.changed:
            self._generation += 1
            self._starting = False
            self._last_answer = time.monotonic()
            self._greeting = next(self.calls)
            self.weights.begin_reading()
            self._catching_up = True
            messages = self._restored_messages()
        self._begin_thread(self._read, worker)
        for message in (*messages, Message("ping", call=self._greeting)):
            self._send(worker, message)

    def _begin_thread(self, run: Callable[..., None], *arguments: Worker) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        thread.start()
        with self.changed:
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def _be_ready(self, worker: Worker) -> None:
        """Opens for calls: the worker has the weights, so they may be overwritten.

        Called last: a waiting writer then hands the next weights to the workers that are ready.
        """
        late = [request for request in self.outstanding.values() if request.id not in self._handed_in]
        for message in submit_messages(late):
            self._send(worker, message)
        if self.aborted:
            self._send(worker, Message("abort", {"ids": sorted(self.aborted)}))
        self.ready = True
        self._end_catching_up()

    def _restored_messages(self) -> list[Message]:
        """Returns the state to restore in a new worker: precision, weights, the head, every request."""
        self._handed_in = set(self.outstanding)
        messages = [Message("fall_back")] if self.fell_back else []
        if self.weights.version is not None:
            stale = self.weights.changed_in_place()
            messages.append(Message("await_weights") if stale else self._weights_message())
        if self.published is not None:
            messages.append(self.published)
        if self.pacing is not None:
            messages.append(Message("load_pacing", {"state": self.pacing}))
        messages += submit_messages(list(self.outstanding.values()))
        if self.asleep:
            messages.append(Message("sleep"))
        return messages

    def _weights_message(self) -> Message:
        return Message("update_weights", self.weights.notices([str(self.worker.id)])[0])

    def _end_catching_up(self) -> None:
        if self._catching_up:
            self._catching_up = False
            self.weights.end_reading()

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
                    greeted = message.call == self._greeting
                    if greeted:
                        self._be_ready(worker)
                    elif message.call in self.answers:
                        self.answers[message.call] = message
                    self.changed.notify_all()
                if greeted and self.owner is not None:
                    self.owner.ready(self)
        except Disconnected as reason:
            self._replace(worker, str(reason))
        except Exception as error:  # re-raised in the waiting caller
            self._fail(WorkerFailed(f"what the process that generates sent cannot be used: {error!r}"))

    def _fail(self, failure: WorkerFailed) -> None:
        with self.changed:
            self.ready = False
            self.failure = failure
            self._end_catching_up()
            self.changed.notify_all()
        if self.owner is not None:
            self._hand_back(self.owner)
            self.owner.failed(self, failure)

    def _hand_back(self, owner: Owner) -> None:
        """Returns unfinished requests to the owner, for another worker."""
        with self.changed:
            requests = list(self.outstanding.values())
            self.outstanding.clear()
            self.aborted.clear()
        owner.lost(self, requests)

    def _arrive(self, message: Message) -> None:
        with self.changed:
            request = self.outstanding.pop(message.fields["id"], None)
            if request is None:
                return
            self.aborted.discard(request.id)
            completion = read_completion(message, request)
            self._tries = 0
            if self.owner is None:
                self.arrived.append(completion)
                self.changed.notify_all()
        if self.owner is not None:
            self.owner.completed(self, completion)

    def _replace(self, worker: Worker, reason: str) -> None:
        with self.changed:
            if self.closed:
                return
            self.ready = False
            self._end_catching_up()
            self.changed.notify_all()
            self._starting = True
            self._starter = threading.current_thread()
            self._tries += 1
            self.restarts += 1
        if self.owner is not None:
            self._hand_back(self.owner)
        code = worker.end()
        self.warn(
            f"the process that generates is gone (code {code}); another one takes over "
            f"{len(self.outstanding)} requests"
        )
        failure = WorkerFailed(
            f"the process that generates ended {self._tries} times in a row without finishing anything, "
            f"last with code {code} ({reason}); what it said is above"
        )
        while self._tries <= self.patience.restarts:
            try:
                self._begin(self.place(self.launch, self.weights))
                return
            except WorkerFailed as problem:  # it was lost while starting
                failure = problem
                self._tries += 1
            if self.closed:
                return
        self._fail(failure)

    def _beats(self) -> Iterator[Worker]:
        """Yields the worker at every heartbeat while it is up, until the client closes."""
        while not self.closed and self.failure is None:
            with self.changed:
                self.changed.wait_for(lambda: self.closed, self.patience.beat)
                worker, starting = self.worker, self._starting
            if not starting and not self.closed:
                yield worker

    def _ping(self) -> None:
        """Pings the worker; blocks while the worker does not read, so another thread watches."""
        for worker in self._beats():
            self._send(worker, Message("ping", call=next(self.calls)))

    def _watch(self) -> None:
        for worker in self._beats():
            silent = time.monotonic() - self._last_answer
            if silent > self.patience.answer:
                self.warn(f"the process that generates has not answered for {silent:.0f} s and is killed")
                worker.kill()
                self._last_answer = time.monotonic()
