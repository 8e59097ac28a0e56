"""A drop-in `Backend` of several worker processes behind one queue.

    submit ──▶ queue ◀──pulls as capacity frees── replica 0 ──┐
                 ▲   ◀──────────────────────────── replica 1 ──┼──▶ arrived ──▶ completions()
                 └── what a lost replica had, again ─── ✗ ─────┘

Seeds decide what a request samples, so it does not matter where it runs, nor how often. A replica that dies,
hangs or runs out of memory is replaced by its client (`worker/client.py`); meanwhile the others take its
requests. A replica that cannot be replaced is dropped, and the run ends only when none is left or one request
has crashed several replicas.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from paceline.backend import Backend, LowPrecision, Speculation
from paceline.cluster.handover import hand_over
from paceline.cluster.idle import Activity, IdleClock
from paceline.cluster.idle_training import IdleTraining
from paceline.cluster.merged_stats import merge_stats
from paceline.cluster.queue import RequestQueue
from paceline.cluster.replica import Place, Replica
from paceline.cluster.speculation import PoolSpeculation
from paceline.pacing.sharing import merge_pacing
from paceline.stats import ReplicaStats, RolloutStats
from paceline.types import Completion, FinishReason, Precision, Request
from paceline.worker.capabilities import RemotePrecision
from paceline.worker.client import Patience
from paceline.worker.codec import read_stats
from paceline.worker.process import Launch, WorkerFailed
from paceline.worker.readers import Weights
from paceline.worker.weights import SharedWeights
from paceline.worker.wire import Message

# On how many lost replicas a request may have been running.
RETRIES = 3

# Fields of a replica's description that differ between replicas.
OWN = ("process", "trains")


class ReplicaPool(Backend):
    """Several replicas of one generator, each in a process of its own."""

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

        `memory` is how weights travel: shared memory of this machine, unless another way is given.
        """
        self.own_weights = weights
        self.warn = warn
        self.retries = retries
        self.changed = threading.Condition()
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
        self.replicas = [Replica(number, self, capacity) for number in range(len(places))]
        self._callers = ThreadPoolExecutor(len(places))
        self._patience = patience or Patience()
        started = [
            self._callers.submit(replica.start, launch, place, self.memory, warn, self._patience)
            for replica, place in zip(self.replicas, places, strict=True)
        ]
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
            if replica.client is not None:
                replica.client.abort(own)

    def update_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        """Updates every replica; one that is being replaced gets the weights before anything else."""
        self._check()
        self.memory.write(version, self.own_weights() if weights is None else weights)
        ready = [replica for replica in self.replicas if replica.is_ready]
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
        answers = self.ask_all(Message("take_stats"))
        parts = [(replica.number, read_stats(answer.fields["stats"])) for replica, answer in answers]
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
        return PoolSpeculation(self) if self.description["speculates"] else None

    @property
    def low_precision(self) -> LowPrecision | None:
        return RemotePrecision(self) if self.description["low_precision"] else None

    # -- all replicas at once ---------------------------------------------------------------------

    @property
    def live(self) -> list[Replica]:
        """The replicas that have not been dropped, ready or being replaced."""
        return [replica for replica in self.replicas if not replica.gone]

    @property
    def restarts(self) -> int:
        return sum(replica.client.restarts for replica in self.replicas if replica.client is not None)

    @property
    def description(self) -> dict:
        return next(replica.client.description for replica in self.live)

    @description.setter
    def description(self, fields: dict) -> None:
        for replica in self.live:  # one of them answered for all
            own = {key: value for key, value in replica.client.description.items() if key in OWN}
            replica.client.description = fields | own

    @property
    def fell_back(self) -> bool:
        return any(replica.client.fell_back for replica in self.live)

    @fell_back.setter
    def fell_back(self, value: bool) -> None:
        for replica in self.live:
            replica.client.fell_back = value

    @property
    def published(self) -> Message | None:
        return self.live[0].client.published

    @published.setter
    def published(self, message: Message | None) -> None:
        for replica in self.live:
            replica.client.published = message

    def call(self, message: Message) -> Message:
        """Calls every live replica and returns one of the answers."""
        while True:
            answers = self.ask_all(message)
            if answers:
                return answers[0][1]
            with self.changed:
                self.changed.wait_for(lambda: self.failure or any(r.is_ready for r in self.replicas), 1.0)
                self._check()

    def ask_all(self, message: Message) -> list[tuple[Replica, Message]]:
        """Returns the answers of the replicas that are ready and stay so; others are being replaced."""
        self._check()

        def ask(replica: Replica) -> Message | None:
            try:
                return replica.client.ask(message)
            except WorkerFailed:
                if replica.gone or replica.client.failure is not None:
                    return None  # the pool already knows
                raise

        ready = [replica for replica in self.replicas if replica.is_ready]
        answers = list(self._callers.map(ask, ready))
        self._check()
        return [(replica, answer) for replica, answer in zip(ready, answers, strict=True) if answer]

    def _set_asleep(self, asleep: bool) -> None:
        for replica in self.live:
            replica.client.asleep = asleep
        self.ask_all(Message("sleep" if asleep else "wake"))

    def _share_pacing(self) -> None:
        if not self.description["speculates"]:
            return
        states = [answer.fields["state"] for _, answer in self.ask_all(Message("pacing"))]
        states = [state for state in states if state is not None]
        if not states:
            return
        merged = merge_pacing(states)
        for replica in self.live:
            replica.client.pacing = merged
        self.ask_all(Message("load_pacing", {"state": merged}))

    # -- what replicas report (replica.py) ----------------------------------------------------------

    def next_requests(self, replica: Replica) -> list[Request]:
        with self.changed:
            self.changed.wait_for(lambda: self.closed or replica.gone or self._may_take(replica))
            if self.closed or replica.gone:
                return []
            requests = self.queue.take(replica.number, self._room(replica))
            replica.outstanding.update({request.id: request for request in requests})
            self._tick()
            return requests

    def completed(self, replica: Replica, completion: Completion) -> None:
        """Receives a completion; a request ends once, wherever it ran."""
        with self.changed:
            request = replica.outstanding.pop(completion.request.id, None)
            if request is None:
                return
            self.queue.note(completion, replica.number)
            self.aborted.discard(request.id)
            self.retried.pop(request.id, None)
            self.arrived.append(completion)
            self._tick()

    def lost(self, replica: Replica, requests: list[Request]) -> None:
        """Requeues the unfinished requests of a lost worker; too many retries are an error."""
        with self.changed:
            self.queue.forget(replica.number)
            mine = [request for request in requests if replica.outstanding.pop(request.id, None) is not None]
            for request in mine:
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
            self._tick()

    def changed_state(self) -> None:
        with self.changed:
            self._tick()

    def failed(self, replica: Replica, failure: WorkerFailed) -> None:
        """Continues without this replica, unless it was the last one."""
        with self.changed:
            replica.gone = True
            self.queue.forget(replica.number)
            left = len(self.live)
            if not left:
                self.failure = failure
            self._tick()
        if left:
            self.warn(
                f"replica {replica.number} is given up ({failure}); {left} of {len(self.replicas)} are left"
            )

    def activity(self, seconds: float, seen: int) -> Activity | None:
        with self.changed:
            self.changed.wait_for(
                lambda: self._changes != seen or self.closed or self.failure is not None, seconds
            )
            if self.closed or self.failure is not None:
                return None
            return Activity(
                [replica.is_ready and replica.trains for replica in self.replicas],
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

    def _may_take(self, replica: Replica) -> bool:
        if not replica.is_ready or not self.queue:
            return False
        return self.queue.waits_for(replica.number) or (self.queue.unbound > 0 and self._room(replica) > 0)

    def _room(self, replica: Replica) -> int:
        """Returns how many requests a replica may take: its free capacity, up to its share."""
        ready = [other for other in self.replicas if other.is_ready]
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
