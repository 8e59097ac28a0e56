"""RL steps on simulated replicas: every mode of docs/modes.md, and one step off, by one event loop.

The requests of RL step n are released when the weights have version n - lag or later (version = updates made
so far). Update n starts when its samples are there and the learner is free:

    take "batch"   all responses of step n: synchronous with lag 0, one-step-off with lag 1
    take "any"     as many finished responses as a step has, oldest weights first; but an update waits for
                   responses that would otherwise be older than the lag allows
    take "first"   the first responses of step n whose groups are whole; the others are dropped

With `whole_groups` a response counts once all of its group are scored; with `stops` nothing is generated
while the learner works.

Events are finishing requests, ends of updates, rewards that arrive. Between them every replica runs on its
own.
"""

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from paceline.simulate.replica import Replica, SimulatedRequest


@dataclass(frozen=True)
class StageSeconds:
    """The seconds that a step needs besides generation."""

    reward: float = 0.0  # after each response, overlapped with the rest
    logprob: float = 0.0
    train: float = 0.0
    sync: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """When requests are released and which responses an update takes."""

    lag: int = 0
    take: str = "batch"
    steps: int = 1
    recompute: bool = False  # running requests recompute their cache under new weights
    whole_groups: bool = False  # a response counts once its siblings are there
    stops: bool = False  # no generation while the learner works
    step_responses: int = 0  # that an update learns from; 0: as many as are released for it


@dataclass
class StepRecord:
    """One RL step: when its update ran, and what it learned from."""

    start: float  # end of the update before
    update_start: float
    stop: float
    lags: list[int] = field(default_factory=list)
    tokens: int = 0
    generated_tokens: float = 0.0

    @property
    def seconds(self) -> float:
        """Returns the time from the update before to this one."""
        return self.stop - self.start

    @property
    def exposed_generation(self) -> float:
        """Returns the learner's idle time."""
        return max(0.0, self.update_start - self.start)


class Pipeline:
    """Generation on replicas and learning from it, over a number of RL steps."""

    def __init__(
        self,
        replicas: list[Replica],
        batches: list[np.ndarray],
        group: int,
        prompt: int,
        stages: StageSeconds,
        schedule: Schedule,
    ) -> None:
        self.replicas = replicas
        self.stages = stages
        self.schedule = schedule
        self.batches = [_requests(index, lengths, group, prompt) for index, lengths in enumerate(batches)]
        self.batch_size = schedule.step_responses or len(batches[0])
        self.group_size = group
        self.scored: dict[int, list[SimulatedRequest]] = {}  # of groups that are not whole yet
        self.version = 0
        self.released = 0
        self.queue: deque[SimulatedRequest] = deque()  # released, but no replica had a slot
        # How many requests have begun and are not scored yet, by version.
        self.outstanding: Counter[int] = Counter()
        # Finished and scored, not learned from: a heap by batch, or oldest version first, and its counts.
        self.ready: list[tuple[int, int, SimulatedRequest]] = []
        self.ready_counts: Counter[int] = Counter()
        self.updating = False
        self.records: list[StepRecord] = []
        self.response_times: list[list[float]] = [[] for _ in batches]
        self.last_update = 0.0
        self.events: list[tuple[float, int, str, object]] = []
        self.event_number = 0

    def run(self) -> list[StepRecord]:
        self._release(0.0)
        planned = [(replica.next_event(), i) for i, replica in enumerate(self.replicas)]
        heapq.heapify(planned)
        while len(self.records) < self.schedule.steps:
            next_replica = planned[0][0] if planned else math.inf
            next_event = self.events[0][0] if self.events else math.inf
            if min(next_replica, next_event) == math.inf:
                raise AssertionError("the simulation stalled: nothing runs and no update is due")
            if next_event <= next_replica:
                time, _, kind, payload = heapq.heappop(self.events)
                changed = self._handle(time, kind, payload)
            else:
                _, i = heapq.heappop(planned)
                replica = self.replicas[i]
                if replica.plan is None or replica.plan.stop != next_replica:
                    continue  # it was replanned meanwhile, and its new entry is in the heap
                self._finished(replica.run_to_event(), replica.clock)
                self._refill(replica)
                changed = [i]
            for i in changed:
                stop = self.replicas[i].next_event()
                if stop < math.inf:
                    heapq.heappush(planned, (stop, i))
        return self.records

    # -- events -------------------------------------------------------------------------------------------

    def _at(self, time: float, kind: str, payload: object = None) -> None:
        self.event_number += 1
        heapq.heappush(self.events, (time, self.event_number, kind, payload))

    def _handle(self, time: float, kind: str, payload: object) -> list[int]:
        """Handles one event; returns the replicas whose plans changed."""
        if kind == "scored":
            assert isinstance(payload, SimulatedRequest)
            for request in self._whole(payload):
                self.outstanding[request.version] -= 1
                key = self._ready_key(request)
                heapq.heappush(self.ready, (key, request.id, request))
                self.ready_counts[key] += 1
            began = self._try_update(time)
            return list(range(len(self.replicas))) if began and self.schedule.stops else []
        if kind == "trained":
            assert isinstance(payload, StepRecord)
            if not self.schedule.stops:
                self._pause(time, payload.stop)
            self._at(payload.stop, "updated", payload)
        else:
            assert isinstance(payload, StepRecord)
            self.updating = False
            self.version += 1
            self.records.append(payload)
            self.last_update = time
            self._release(time)
            self._try_update(time)
        return list(range(len(self.replicas)))

    def _whole(self, request: SimulatedRequest) -> list[SimulatedRequest]:
        """Returns the responses that count now that this one is scored."""
        if not self.schedule.whole_groups:
            return [request]
        siblings = self.scored.setdefault(request.group, [])
        siblings.append(request)
        return self.scored.pop(request.group) if len(siblings) == self.group_size else []

    def _pause(self, time: float, until: float) -> None:
        for replica in self.replicas:
            self._finished(replica.run_until(time), time)
            replica.pause(until, self.schedule.recompute)

    def _give_up(self, time: float) -> None:
        """Aborts the responses that the step did not wait for."""
        self.queue.clear()
        self.ready.clear()
        self.ready_counts.clear()
        self.outstanding.clear()
        self.scored.clear()
        self.events = [event for event in self.events if event[2] != "scored"]
        heapq.heapify(self.events)
        for replica in self.replicas:
            replica.run_until(time)
            replica.abort_all()

    def _ready_key(self, request: SimulatedRequest) -> int:
        return request.version if self.schedule.take == "any" else request.batch

    def _finished(self, requests: list[SimulatedRequest], time: float) -> None:
        for request in requests:
            self.response_times[request.batch].append(time)
            self._at(time + self.stages.reward, "scored", request)

    def _try_update(self, time: float) -> bool:
        """Begins the next update where its samples are there; returns whether it did."""
        if self.updating:
            return False
        ready = self._lag_stays_bounded() if self.schedule.take == "any" else self._batch_is_ready()
        if not ready:
            return False
        taken = [heapq.heappop(self.ready)[2] for _ in range(self.batch_size)]
        self.ready_counts.subtract(self._ready_key(request) for request in taken)
        self.updating = True
        trained = time + self.stages.logprob + self.stages.train
        record = StepRecord(
            start=self.last_update,
            update_start=time,
            stop=trained + self.stages.sync,
            lags=[self.version - request.version for request in taken],
            tokens=sum(request.length for request in taken),
            generated_tokens=sum(request.done for request in taken),
        )
        self._at(trained, "trained", record)
        if self.schedule.stops:
            self._pause(time, record.stop)
        if self.schedule.take == "first":
            self._give_up(time)
        return True

    def _batch_is_ready(self) -> bool:
        return self.ready_counts[self.version] >= self.batch_size

    def _lag_stays_bounded(self) -> bool:
        """Returns whether update u = `version` may take the oldest ready responses now.

        A response that began at version v must be learned from in update v + lag at the latest. So once this
        update has taken its share, those due by update u + i must fit into the i updates left, for every i:
        the feasibility of an earliest-deadline-first schedule. If they do not, the update waits for stale
        responses that still run.
        """
        if len(self.ready) < self.batch_size:
            return False
        left = Counter(self.outstanding)
        share = self.batch_size
        for version, count in sorted(self.ready_counts.items()):
            taken = min(share, count)
            share -= taken
            left[version] += count - taken
        lag = self.schedule.lag
        return all(
            sum(n for version, n in left.items() if version + lag <= self.version + i) <= i * self.batch_size
            for i in range(lag + 1)
        )

    # -- requests to replicas -----------------------------------------------------------------------------

    def _release(self, time: float) -> None:
        while self.released < len(self.batches) and self.released <= self.version + self.schedule.lag:
            self.queue.extend(self.batches[self.released])
            self.released += 1
        self._deal()
        for replica in self.replicas:
            self._admit(replica)

    def _deal(self) -> None:
        """Deals whole groups, which share their prompt's cache, to the replicas with the fewest requests."""
        load = [(replica.outstanding, i) for i, replica in enumerate(self.replicas)]
        heapq.heapify(load)
        spread = len(self.queue) < len(self.replicas) * 2 * max(1, self._group_size())
        while self.queue and load:
            count, i = heapq.heappop(load)
            replica = self.replicas[i]
            if count >= replica.max_running:
                break
            group = self.queue[0].group
            while self.queue and count < replica.max_running and self.queue[0].group == group:
                replica.waiting.append(self.queue.popleft())
                count += 1
                if spread:
                    break
            heapq.heappush(load, (count, i))

    def _group_size(self) -> int:
        first = self.queue[0].group if self.queue else 0
        return sum(request.group == first for request in list(self.queue)[:64])

    def _refill(self, replica: Replica) -> None:
        while self.queue and replica.outstanding < replica.max_running:
            replica.waiting.append(self.queue.popleft())
        self._admit(replica)

    def _admit(self, replica: Replica) -> None:
        if replica.waiting:
            self.outstanding[self.version] += replica.admit(self.version)


def _requests(index: int, lengths: np.ndarray, group: int, prompt: int) -> list[SimulatedRequest]:
    first = index * len(lengths)
    return [
        SimulatedRequest(first + i, prompt, int(n), (first + i) // group, index)
        for i, n in enumerate(lengths)
    ]
