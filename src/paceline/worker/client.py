"""A `Backend` whose generator runs in a worker process; whoever uses it cannot tell the difference.

    submit ──▶ outstanding ──▶ worker ──reader thread──▶ arrived ──▶ completions()
                   │             ✗ killed or hung
                   └────────▶ another worker: newest weights, every outstanding request again

The worker goes on while nobody reads `completions`: what it finishes waits in `arrived`, which can never hold
more than was handed in. A request leaves `outstanding` when its completion arrives, so it ends once, however
often it was run. A worker that dies, or does not answer a ping in time, is replaced; requests keep their
seeds, so those under the same weights give the same tokens.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.backend import Backend, LowPrecision, Speculation, WeightsNotFinite
from paceline.pacing.strategy import Pacer
from paceline.policy.attention import AttentionObserver
from paceline.stats import RolloutStats
from paceline.types import Completion, Precision, Request
from paceline.worker.codec import read_completion, read_stats, read_tensors, submit_message, tensor_arrays
from paceline.worker.process import Launch, WorkerFailed, WorkerProcess
from paceline.worker.weights import SharedWeights
from paceline.worker.wire import Disconnected, Message


@dataclass(frozen=True)
class Patience:
    """How long a client waits, in seconds, and how often it tries."""

    start: float = 600.0  # for a worker to load its model
    answer: float = 120.0  # for a ping: longer than any step, captures and compilations included
    beat: float = 2.0  # between pings
    close: float = 5.0
    restarts: int = 3  # in a row, without anything finished between them


class WorkerBackend(Backend):
    """The client of one worker, which it starts, watches and replaces."""

    def __init__(
        self,
        launch: Launch,
        weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        warn: Callable[[str], None] = lambda message: None,
        patience: Patience | None = None,
    ) -> None:
        """`weights` returns the learner's own, for `update_weights` without any."""
        self.launch = launch
        self.own_weights = weights
        self.warn = warn
        self.patience = patience or Patience()
        self.changed = threading.Condition()
        self.outstanding: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.arrived: deque[Completion] = deque()
        self.answers: dict[int, Message] = {}
        self.calls = itertools.count(1)
        self.paused = False
        self.closed = False
        self.failure: WorkerFailed | None = None
        self.restarts = 0  # in all
        self._tries = 0  # since anything was finished
        self._generation = 0
        self.ready = False
        self._last_answer = time.monotonic()
        self._fell_back = False
        self._version: int | None = None
        self._drafter: dict[str, torch.Tensor] = {}
        self.description: dict = {}
        self.weights = SharedWeights()
        self.worker = WorkerProcess(launch, self.weights)
        self._begin(self.worker)
        threading.Thread(target=self._watch, daemon=True).start()

    # -- the contract (backend.py) ----------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        with self.changed:
            self._check()
            self.outstanding.update({request.id: request for request in requests})
            ready, worker = self.ready, self.worker
        if ready:  # else the worker that is starting gets it
            self._send(worker, submit_message(requests))

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
        """Hands weights over; returns when the worker generates with them."""
        with self.changed:
            self.changed.wait_for(lambda: self.ready or self.failure is not None or self.closed)
            self.weights.write(self.own_weights() if weights is None else weights)
            self._version = version
        self.description = self._call(self._weights_message()).fields

    def pause(self) -> None:
        self.paused = True
        if self.changed.acquire(blocking=False):  # a signal handler may have interrupted who holds it
            self.changed.notify_all()
            self.changed.release()

    def resume(self) -> None:
        self.paused = False

    def take_stats(self) -> RolloutStats:
        return read_stats(self._call(Message("take_stats")).fields["stats"])

    def sleep(self) -> None:
        self._call(Message("sleep"))

    def wake(self) -> None:
        self._call(Message("wake"))

    def close(self) -> None:
        with self.changed:
            if self.closed:
                return
            self.closed = True
            self.outstanding.clear()
            self.changed.notify_all()
        try:
            self.worker.connection.send(Message("close"))
            self.worker.wait(self.patience.close)
        except Disconnected:
            pass
        self.worker.end()
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
        """Asks the worker and returns its answer; asks again where the worker was replaced meanwhile."""
        return self._call(message)

    def _call(self, message: Message) -> Message:
        while True:
            number = next(self.calls)
            with self.changed:
                self.changed.wait_for(lambda: self.ready or self.failure is not None or self.closed)
                self._check()
                worker, generation = self.worker, self._generation
            self._send(worker, Message(message.kind, message.fields, message.arrays, number))
            with self.changed:
                self.changed.wait_for(
                    lambda: number in self.answers
                    or generation != self._generation
                    or self.failure is not None
                )
                self._check()
                if number in self.answers:
                    return self._accepted(self.answers.pop(number))

    def _accepted(self, answer: Message) -> Message:
        if answer.kind == "refused":
            raise WeightsNotFinite(answer.fields["problem"])
        return answer

    def _send(self, worker: WorkerProcess, message: Message) -> None:
        """Sends; a worker that is gone is replaced by its reader, which hands in everything again."""
        try:
            worker.connection.send(message)
        except Disconnected:
            pass

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
        assert not self.closed, "this backend is closed"

    # -- the worker -------------------------------------------------------------------------------

    def _begin(self, worker: WorkerProcess) -> None:
        """Waits for a new worker's hello, brings it up to date, and lets its reader run."""
        started = threading.Timer(self.patience.start, worker.process.kill)
        started.start()
        try:
            self.description = worker.connection.receive().fields
        except Disconnected:
            code = worker.end()
            raise WorkerFailed(
                f"the process that generates ended with code {code} before it was ready; what it said is "
                "above. With a full GPU, lower rollout.kv_tokens; without a cure, use rollout.mode=partial"
            ) from None
        finally:
            started.cancel()
        with self.changed:
            self.worker = worker
            self._generation += 1
            self._last_answer = time.monotonic()
            restored = self._restored_messages()
        for message in restored:
            self._send(worker, message)
        with self.changed:
            late = [r for r in self.outstanding.values() if r.id not in self._handed_in]
            if late:
                self._send(worker, submit_message(late))
            self.ready = True
            self.changed.notify_all()
        threading.Thread(target=self._read, args=(worker,), daemon=True).start()

    def _restored_messages(self) -> list[Message]:
        """Returns what a new worker must be told: precision, weights, the head, every request."""
        self._handed_in = set(self.outstanding)
        messages = [Message("fall_back")] if self._fell_back else []
        if self._version is not None:
            messages.append(self._weights_message())
        if self._drafter:
            messages.append(_publish_message(self._version or 0, self._drafter))
        if self.outstanding:
            messages.append(submit_message(list(self.outstanding.values())))
        if self.aborted:
            messages.append(Message("abort", {"ids": sorted(self.aborted)}))
        return messages

    def _weights_message(self) -> Message:
        return Message("update_weights", {"version": self._version, "layout": self.weights.layout})

    def _read(self, worker: WorkerProcess) -> None:
        """Takes in what a worker sends; replaces it when it is gone."""
        try:
            while True:
                message = worker.connection.receive()
                with self.changed:
                    self._last_answer = time.monotonic()
                    if message.kind == "completion":
                        self._arrive(message)
                    elif message.call:
                        self.answers[message.call] = message
                    self.changed.notify_all()
        except Disconnected as reason:
            self._replace(worker, str(reason))

    def _arrive(self, message: Message) -> None:
        request = self.outstanding.pop(message.fields["id"], None)
        if request is not None:
            self.aborted.discard(request.id)
            self.arrived.append(read_completion(message, request))
            self._tries = 0

    def _replace(self, worker: WorkerProcess, reason: str) -> None:
        with self.changed:
            if self.closed:
                return
            self.ready = False
            self._tries += 1
            self.restarts += 1
            tries = self._tries
        code = worker.end()
        try:
            if tries > self.patience.restarts:
                raise WorkerFailed(
                    f"the process that generates ended {tries} times in a row without finishing anything, "
                    f"last with code {code} ({reason}); what it said is above"
                )
            self.warn(
                f"the process that generates is gone (code {code}); another one takes over "
                f"{len(self.outstanding)} requests"
            )
            self._begin(WorkerProcess(self.launch, self.weights))
        except WorkerFailed as failure:
            with self.changed:
                self.failure = failure
                self.changed.notify_all()

    def _watch(self) -> None:
        """Pings the worker, and kills one that does not answer: its reader then replaces it."""
        while not self.closed and self.failure is None:
            time.sleep(self.patience.beat)
            with self.changed:
                worker, ready = self.worker, self.ready
                silent = time.monotonic() - self._last_answer
            if not ready or self.closed:
                continue
            if silent > self.patience.answer:
                self.warn(f"the process that generates has not answered for {silent:.0f} s and is killed")
                worker.process.kill()
                self._last_answer = time.monotonic()
            else:
                self._send(worker, Message("ping", call=next(self.calls)))


@dataclass(frozen=True)
class RemoteSpeculation:
    """The worker's drafters, as far as another process can reach them."""

    backend: WorkerBackend
    # The pacer lives in the worker; nobody here can switch it off or save it.
    pacer: Pacer | None = None

    @property
    def keeps_tokens(self) -> bool:
        """Whether completions are the same tokens with and without speculation."""
        return bool(self.backend.description["keeps_tokens"])

    @property
    def trainable_head(self) -> nn.Module | None:
        """None: the head that drafts lies in the worker."""
        return None

    def publish_drafter(self, version: int, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Sends a trained head to the worker; kept, for one that takes over."""
        assert weights is not None, "the head lies in another process: its weights must be sent"
        self.backend._drafter = dict(weights)
        self.backend.call(_publish_message(version, weights))

    def drafter_state(self) -> dict[str, torch.Tensor]:
        """Returns what drafters have learned, for a checkpoint."""
        answer = self.backend.call(Message("drafter_state"))
        return read_tensors(answer.fields["tensors"], answer.arrays)

    def load_drafter_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores what `drafter_state` returned."""
        names, arrays = tensor_arrays(tensors)
        self.backend.call(Message("load_drafter_state", {"tensors": names}, arrays))


@dataclass(frozen=True)
class RemotePrecision:
    """The worker's low precision; its scales do not depend on the learner."""

    backend: WorkerBackend
    attention_observer: AttentionObserver | None = None

    def fall_back_to_base_precision(self) -> None:
        """Switches to `Precision.BASE` with the current weights."""
        self.backend._fell_back = True
        self.backend.description = self.backend.call(Message("fall_back")).fields

    def calibration_state(self) -> dict[str, torch.Tensor]:
        """Returns nothing: an FP8 cache is refused where the learner is in another process."""
        return {}

    def load_calibration_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes nothing over."""


def _publish_message(version: int, weights: Mapping[str, torch.Tensor]) -> Message:
    names, arrays = tensor_arrays(weights)
    return Message("publish_drafter", {"version": version, "tensors": names}, arrays)
