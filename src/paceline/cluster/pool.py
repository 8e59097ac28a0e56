"""A `Backend` of worker processes behind one queue; a worker alone is a pool of one.

    submit ──▶ queue ◀──pulls as capacity frees── replica 0 ──┐
                 ▲   ◀──────────────────────────── replica 1 ──┼──▶ arrived ──▶ completions()
                 └── what a lost replica had, again ─── ✗ ─────┘

Replicas go on while nobody reads `completions`. Seeds decide what a request samples, so it does not matter
where it runs, nor how often. A replica that dies, hangs or runs out of memory is replaced by its client
(`worker/client.py`); meanwhile the others take its requests. A replica that cannot be replaced is dropped,
and the run ends only when none is left or one request has crashed several replicas.
"""

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from paceline.backend import Backend, LowPrecision, Speculation
from paceline.cluster.capabilities import RemotePrecision, RemoteSpeculation
from paceline.cluster.handover import hand_over
from paceline.cluster.idle import Activity, IdleClock
from paceline.cluster.idle_training import IdleTraining
from paceline.cluster.merged_stats import merge_stats
from paceline.cluster.queue import RequestQueue
from paceline.pacing.sharing import merge_pacing
from paceline.records import parse
from paceline.stats import ReplicaStats, RolloutStats
from paceline.types import Completion, FinishReason, Precision, Request
from paceline.worker.client import Patience, Restored, Setup, WorkerClient
from paceline.worker.process import Launch, Place, WorkerFailed
from paceline.worker.readers import Weights
from paceline.worker.weights import SharedWeights
from paceline.worker.wire import Message

# On how many lost replicas a request may have been running.
RETRIES = 3

# The capacity of a worker alone, which orders its requests itself.
UNLIMITED = sys.maxsize


class ReplicaPool(Backend):
    """Several replicas of one generator, each in a process of its own."""

    gives_memory = False  # whether it sleeps while the policy learns, because they share a GPU
    cure = "With a full GPU, lower rollout.kv_tokens; without a cure, use rollout.mode=partial"

    def __init__(
        self,
        launch: Launch,
        places: Sequence[Place],
        capacity: int,
        weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        warn: Callable[[str], None] = lambda message: None,
        patience: Patience | None = None,
        retries: int = RETRIES,
        memory: Weights | None = None,
    ) -> None:
        """Starts one replica per entry of `places`; each is given at most `capacity` requests at a time.

        `weights` returns the learner's own, for `update_weights` without any. `memory` is how they travel:
        shared memory of this machine, unless another way is given.
        """
        self.own_weights = weights
        self.warn = warn
        self.retries = retries
        self.changed = threading.Condition()
        self.restored = Restored()
        self.queue = RequestQueue()
        self.arrived: deque[Completion] = deque()
        self.aborted: set[str] = set()
        self.retried: Counter[str] = Counter()  # how often each request that is under way ran again
        self.num_retried = 0  # in all
        self.paused = False
        self.closed = False
        self.failure: WorkerFailed | None = None
        self.memory = memory or SharedWeights()
        self._clock = IdleClock()
        self._changes = 0
        self.idle_training: IdleTraining | None = None  # where replicas can train their drafter
        self._patience = patience or Patience()
        self.replicas = [
            WorkerClient(
                number, self, capacity, place, Setup(launch, self.memory, say, self._patience, self.cure)
            )
            for number, place in enumerate(places)
            for say in [warn if len(places) == 1 else _of_replica(number, warn)]
        ]
        self._callers = ThreadPoolExecutor(len(places))
        started = [self._callers.submit(replica.start) for replica in self.replicas]
        problems = [problem for future in started if (problem := future.exception()) is not None]
        if problems:
            self.close()
            raise problems[0]
        if any(replica.trains for replica in self.live):
            self.idle_training = IdleTraining(self)
            self.idle_training.start()

    # -- the contract (backend.py) ----------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        with self.changed:
            self._check()
            self.queue.add(requests)
            self._tick()

    def completions(self) -> Iterator[Completion]:
        while True:
            with self.changed:
                while not (self.arrived or self.paused or not self._num_outstanding):
                    self._check()
                    self.changed.wait(0.1)
                if self.paused or not self.arrived:
                    return
                completion = self.arrived.popleft()
            yield completion

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = set(request_ids)
        with self.changed:
            for request in self.queue.remove(ids):
                self._arrive_aborted(request)
            running = {replica: own for replica in self.replicas if (own := ids & replica.outstanding.keys())}
            self.aborted.update(*running.values())
            self._tick()
        for replica, own in running.items():
            replica.tell_to_abort(own)

    def update_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        """Updates every replica; one that is being replaced gets the weights before anything else."""
        self._check()
        self.memory.write(version, self.own_weights() if weights is None else weights)
        ready = [replica for replica in self.replicas if replica.ready]
        hand_over(self.memory, ready, self._callers)
        self._check()
        self._share_pacing()

    def pause(self) -> None:
        self.paused = True
        if self.changed.acquire(blocking=False):  # a signal handler may have interrupted the holder
            self.changed.notify_all()
            self.changed.release()

    def resume(self) -> None:
        self.paused = False

    def take_stats(self) -> RolloutStats:
        answers = self.call_all(Message("take_stats"))
        parts = [(replica.number, parse(RolloutStats, answer.fields["stats"])) for replica, answer in answers]
        with self.changed:
            self._tick()
            shares = self._clock.take_shares()
            replicas = ReplicaStats(len(self.live), self.restarts, self.num_retried, *shares)
        return merge_stats(parts, replicas)

    def admission_state(self) -> dict[str, torch.Tensor]:
        with self.changed:
            return self.queue.lengths.state()

    def load_admission_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with self.changed:
            self.queue.lengths.load_state(tensors)

    def sleep(self) -> None:
        self._set_asleep(True)

    def wake(self) -> None:
        self._set_asleep(False)

    def close(self) -> None:
        with self.changed:
            if self.closed:
                return
            self.closed = True
            self.queue.clear()
            self.changed.notify_all()
        list(self._callers.map(lambda replica: replica.close(), self.replicas))
        if self.idle_training is not None:
            self.idle_training.close(self._patience.close)
        self._callers.shutdown()
        self.memory.close()

    @property
    def precision(self) -> Precision:
        return Precision(self.description["precision"])

    @property
    def speculation(self) -> Speculation | None:
        return RemoteSpeculation(self) if self.description["speculates"] else None

    @property
    def low_precision(self) -> LowPrecision | None:
        return RemotePrecision(self) if self.description["low_precision"] else None

    # -- all replicas at once ---------------------------------------------------------------------

    @property
    def live(self) -> list[WorkerClient]:
        """The replicas that have not been dropped, ready or being replaced."""
        return [replica for replica in self.replicas if replica.failure is None]

    @property
    def restarts(self) -> int:
        return sum(replica.restarts for replica in self.replicas)

    @property
    def description(self) -> dict[str, Any]:
        return next((replica.description for replica in self.live), {})

    def call(self, message: Message) -> Message:
        """Calls every live replica and returns one of the answers."""
        return self.call_all(message)[0][1]

    def call_all(self, message: Message) -> list[tuple[WorkerClient, Message]]:
        """Returns the answers of all replicas that are ready, once there is any."""
        while not (answers := self.ask_all(message)):
            with self.changed:
                self.changed.wait_for(lambda: self.failure or any(r.ready for r in self.replicas), 1.0)
                self._check()
        return answers

    def ask_all(self, message: Message) -> list[tuple[WorkerClient, Message]]:
        """Returns the answers of the replicas that are ready and stay so; others are being replaced."""
        self._check()

        def ask(replica: WorkerClient) -> Message | None:
            try:
                return replica.ask(message)
            except WorkerFailed:
                if replica.failure is not None:
                    return None  # the pool already knows
                raise

        ready = [replica for replica in self.replicas if replica.ready]
        answers = list(self._callers.map(ask, ready))
        self._check()
        return [(replica, answer) for replica, answer in zip(ready, answers, strict=True) if answer]

    def _set_asleep(self, asleep: bool) -> None:
        self.restored.asleep = asleep
        self.call(Message("sleep" if asleep else "wake"))

    def _share_pacing(self) -> None:
        if not self.description["speculates"]:
            return
        states = [answer.fields["state"] for _, answer in self.ask_all(Message("pacing"))]
        states = [state for state in states if state is not None]
        if states:
            self.restored.pacing = merge_pacing(states)
        if len(states) > 1:
            self.ask_all(Message("load_pacing", {"state": self.restored.pacing}))

    # -- what replicas report (worker/client.py) ----------------------------------------------------

    def next_requests(self, client: WorkerClient) -> list[Request]:
        with self.changed:
            self.changed.wait_for(lambda: self.closed or client.failure is not None or self._may_take(client))
            if self.closed or client.failure is not None:
                return []
            requests = self.queue.take(client.number, self._room(client))
            client.outstanding.update({request.id: request for request in requests})
            self._tick()
            return requests

    def completed(self, client: WorkerClient, completion: Completion) -> None:
        """Receives a completion; a request ends once, wherever it ran."""
        with self.changed:
            request = client.outstanding.pop(completion.request.id, None)
            if request is None:
                return
            self.queue.note(completion, client.number)
            self.aborted.discard(request.id)
            self.retried.pop(request.id, None)
            self.arrived.append(completion)
            self._tick()

    def lost(self, client: WorkerClient) -> None:
        """Requeues the unfinished requests of a lost worker; too many retries are an error."""
        with self.changed:
            self.queue.forget(client.number)
            for request in client.outstanding.values():
                if request.id in self.aborted:
                    self.aborted.discard(request.id)
                    self._arrive_aborted(request)
                    continue
                self.retried[request.id] += 1
                self.num_retried += 1
                if self.retried[request.id] > self.retries:
                    self.failure = WorkerFailed(
                        f"request {request.id} was under way {self.retried[request.id]} times when a replica "
                        "was lost, and is not tried again; what the processes said is above. Where memory "
                        "ran out, lower rollout.max_running or rollout.kv_tokens"
                    )
                self.queue.add([request])
            client.outstanding.clear()
            self._tick()

    def changed_state(self) -> None:
        with self.changed:
            self._tick()

    def failed(self, client: WorkerClient, failure: WorkerFailed) -> None:
        """Continues without this replica, unless it was the last one."""
        with self.changed:
            self.queue.forget(client.number)
            left = len(self.live)
            if not left:
                self.failure = failure
            self._tick()
        if left:
            self.warn(
                f"replica {client.number} is given up ({failure}); {left} of {len(self.replicas)} are left"
            )

    def activity(self, seconds: float, seen: int) -> Activity | None:
        with self.changed:
            self.changed.wait_for(
                lambda: self._changes != seen or self.closed or self.failure is not None, seconds
            )
            if self.closed or self.failure is not None:
                return None
            return Activity(
                [replica.ready and replica.trains for replica in self.replicas],
                [bool(replica.outstanding) for replica in self.replicas],
                waiting=bool(self.queue),
                changes=self._changes,
            )

    def note_trained(self, seconds: float) -> None:
        with self.changed:
            self._clock.note_trained(seconds)

    # -- bookkeeping, under the lock --------------------------------------------------------------

    @property
    def _num_outstanding(self) -> int:
        return len(self.queue) + sum(len(replica.outstanding) for replica in self.replicas)

    def _may_take(self, replica: WorkerClient) -> bool:
        if not replica.ready or not self.queue:
            return False
        return self.queue.waits_for(replica.number) or (self.queue.unbound > 0 and self._room(replica) > 0)

    def _room(self, replica: WorkerClient) -> int:
        """Returns how many requests a replica may take: its free capacity, up to its share."""
        ready = [other for other in self.replicas if other.ready]
        everything = self.queue.unbound + sum(len(other.outstanding) for other in ready)
        share = -(-everything // max(1, len(ready)))
        return min(replica.capacity, share) - len(replica.outstanding)

    def _arrive_aborted(self, request: Request) -> None:
        self.retried.pop(request.id, None)
        self.arrived.append(Completion(request, (), (), FinishReason.ABORTED, ()))

    def _tick(self) -> None:
        """Records the time since the last change and wakes all waiting threads."""
        busy = sum(bool(replica.outstanding) for replica in self.live)
        self._clock.note(len(self.live), busy, bool(self._num_outstanding))
        self._changes += 1
        self.changed.notify_all()

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise WorkerFailed("this backend is closed")


def _of_replica(number: int, warn: Callable[[str], None]) -> Callable[[str], None]:
    return lambda message: warn(f"replica {number}: {message}")
