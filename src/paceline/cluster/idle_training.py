"""The coordinator's commands carried out: replicas that ran out of work train the drafter on what they have.

A thread of its own looks at what replicas do whenever that changes, tells the coordinator, and sends what
follows. It is never in the way of a rollout: a worker that trains stops by itself when work arrives, before
anybody tells it to.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from paceline.backend import Speculation
from paceline.cluster.coordinator import Collect, Command, Coordinator, Start, State, Stop
from paceline.cluster.idle import Activity
from paceline.cluster.replica import Replica
from paceline.worker.codec import read_tensors
from paceline.worker.process import WorkerFailed
from paceline.worker.wire import Message

LOOK_SECONDS = 1.0
Trained = tuple[Mapping[str, torch.Tensor], float]  # weights, and the tokens that they rest on


class Pool(Protocol):
    """The pool, as training sees it."""

    replicas: list[Replica]

    @property
    def speculation(self) -> Speculation | None:
        """What publishes a drafter."""

    def activity(self, seconds: float) -> Activity | None:
        """Returns what replicas do as soon as it changes, or after so long; None: the pool is closed."""


class IdleTraining:
    """Drafter training on the idle replicas of a pool."""

    def __init__(self, pool: Pool, warn: Callable[[str], None]) -> None:
        self.pool = pool
        self.warn = warn
        self.coordinator = Coordinator(len(pool.replicas))
        self.published = 0  # means that were published
        self._trained: dict[int, Trained] = {}
        self._generated = False

    def start(self) -> None:
        """Begins to watch the pool, until it is closed."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while (activity := self.pool.activity(LOOK_SECONDS)) is not None:
            try:
                self.look(activity)
            except WorkerFailed as failure:
                if self.pool.activity(0.0) is not None:  # else the pool was closed meanwhile
                    self.warn(f"drafter training on idle replicas ends: {failure}")
                return

    def look(self, activity: Activity) -> None:
        """Tells the coordinator what has changed, and does what follows."""
        now = time.monotonic()
        coordinator = self.coordinator
        if activity.generates and not self._generated:
            self._trained.clear()
            self._do(coordinator.begin_step(now))
        for number, (ready, busy) in enumerate(zip(activity.ready, activity.busy, strict=True)):
            if not ready:
                self._do(coordinator.lost(number, now))
                continue
            if coordinator.states()[number] is State.LOST:
                self._do(coordinator.came_back(number, now))
            if busy:
                self._do(coordinator.has_work(number, now))
            elif activity.generates and not activity.waiting:
                self._do(coordinator.ran_out(number, now))
            else:
                self._do(coordinator.heartbeat(number, now))
        if self._generated and not activity.generates:
            self._do(coordinator.rollout_over(now))
        self._generated = activity.generates
        self._do(coordinator.tick(now))

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Start():
                    self._ask(command.replica, Message("train", {"term": command.term}))
                case Stop():
                    self._stop(command)
                case Collect():
                    self._publish(command)

    def _stop(self, command: Stop) -> None:
        answer = self._ask(command.replica, Message("stop_training", {"term": command.term}))
        now = time.monotonic()
        if answer is None:
            self._do(self.coordinator.lost(command.replica, now))
            return
        tokens = float(answer.fields["tokens"])
        if tokens:
            weights = read_tensors(answer.fields["tensors"], answer.arrays)
            self._trained[command.replica] = (weights, tokens)
        self._do(self.coordinator.answered(command.replica, command.term, tokens > 0, now))

    def _publish(self, command: Collect) -> None:
        assert self.pool.speculation is not None
        mean = weighted_mean([self._trained[replica] for replica in command.replicas])
        self.pool.speculation.publish_drafter(command.term, mean)
        self.published += 1

    def _ask(self, replica: int, message: Message) -> Message | None:
        client = self.pool.replicas[replica].client
        return client.ask(message) if client is not None else None


def weighted_mean(trained: Sequence[Trained]) -> dict[str, torch.Tensor]:
    """Returns the mean of weights, each counted by the tokens that it rests on, in their own types."""
    whole = sum(tokens for _, tokens in trained)
    mean = {}
    for name, tensor in trained[0][0].items():
        total = sum(weights[name].double() * (tokens / whole) for weights, tokens in trained)
        assert isinstance(total, torch.Tensor)
        mean[name] = total.to(tensor.dtype)
    return mean
