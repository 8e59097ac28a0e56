"""The coordinator's commands carried out: replicas that ran out of work train the drafter on what they have.

    run's thread    begin_rollout ─────────────── end_rollout ── (the policy learns) ── take ──▶ publishes
    own thread              │  who is free: train      │  stop all, fetch weights, mean
                            │  who gets work: stop     │

The run says when a rollout begins and ends; within it a thread looks at what replicas do whenever that
changes, tells the coordinator, and sends what follows. It is never in the way of a rollout: a worker that
trains stops by itself when work arrives, before anybody tells it to, and weights are asked for when the
rollout is over.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from paceline.cluster.coordinator import Collect, Command, Coordinator, Start, State, Stop
from paceline.cluster.idle import Activity
from paceline.cluster.replica import Replica
from paceline.drafting.remote_online import Learned
from paceline.worker.codec import read_tensors, tensor_arrays
from paceline.worker.process import WorkerFailed
from paceline.worker.wire import Message

LOOK_SECONDS = 1.0
Trained = tuple[Mapping[str, torch.Tensor], float]  # weights, and the tokens that they rest on


class Pool(Protocol):
    """The pool, as training sees it."""

    replicas: list[Replica]

    def activity(self, seconds: float, seen: int) -> Activity | None:
        """Returns what replicas do once it is not what was seen, or after so long; None: it is closed."""

    def changed_state(self) -> None:
        """Looks again at everything."""

    def note_trained(self, seconds: float) -> None:
        """Hears that a replica used so much of its idle time."""

    def ask_all(self, message: Message) -> list[tuple[Replica, Message]]:
        """Returns the answers of the replicas that are ready."""


class IdleTraining:
    """Drafter training on the idle replicas of a pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.coordinator = Coordinator(len(pool.replicas))
        self._changed = threading.Condition()
        self._rollouts = 0  # that were begun
        self._open: int | None = None  # the rollout at hand; None: it is over
        self._followed: int | None = None  # that the coordinator knows of
        self._ended = False
        self._learned: Learned | None = None  # of the last rollout, until it is taken
        self._counting = Learned()
        self._start: Mapping[str, torch.Tensor] | None = None  # of the rollout at hand
        self._has_start: set[int] = set()  # replicas that were given it
        self._tokens: dict[int, float] = {}  # by replica, in this rollout
        self._updates: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begins to watch the pool, until it is closed."""
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Waits so long for its thread to end; the pool and its clients are closed."""
        self._thread.join(seconds)

    # -- the run's thread -------------------------------------------------------------------------

    def begin_rollout(self, start: Mapping[str, torch.Tensor] | None = None) -> None:
        """Lets replicas that run out of work train from now on, from `start` or what was published."""
        self._rollouts += 1
        self._start = start
        self._open = self._rollouts
        self.pool.changed_state()

    def end_rollout(self) -> None:
        """Makes all of them stop, without waiting for it."""
        self._open = None
        self.pool.changed_state()

    def take(self, seconds: float) -> Learned | None:
        """Returns what the last rollout's idle time came to; None: not within so many seconds, or nothing."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._followed == self._open, seconds)
            learned, self._learned = self._learned, None
            return learned

    def quality(self, weights: Mapping[str, torch.Tensor]) -> float | None:
        """Returns how well a head of these weights drafts along the replicas' newest texts; None: no text."""
        names, arrays = tensor_arrays(weights)
        answers = self.pool.ask_all(Message("judge_drafter", {"tensors": names}, arrays))
        overlaps = [a.fields["overlap"] for _, a in answers if a.fields["overlap"] is not None]
        return sum(overlaps) / len(overlaps) if overlaps else None

    # -- its own thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        seen = -1
        while (activity := self.pool.activity(LOOK_SECONDS, seen)) is not None:
            seen = activity.changes
            self.look(activity)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def look(self, activity: Activity) -> None:
        """Tells the coordinator what has changed, and does what follows."""
        now = time.monotonic()
        coordinator = self.coordinator
        current = self._open
        if current != self._followed and self._followed is not None:
            self._do(coordinator.rollout_over(now))
        if current != self._followed and current is not None:
            self._begin(now)
        for number, (ready, busy) in enumerate(zip(activity.ready, activity.busy, strict=True)):
            if not ready:
                self._has_start.discard(number)
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
        self._do(coordinator.tick(now))
        if current != self._followed:
            self._settle(current)

    def _begin(self, now: float) -> None:
        self._counting = Learned()
        self._has_start.clear()
        self._tokens.clear()
        self._updates.clear()
        self._do(self.coordinator.begin_step(now))

    def _settle(self, current: int | None) -> None:
        """Lets the run know of a rollout that has ended, or begun."""
        with self._changed:
            if current is None:
                self._learned = self._counting
            self._followed = current
            self._changed.notify_all()

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Start():
                    self._train(command)
                case Stop():
                    self._stop(command)
                case Collect():
                    self._collect(command)

    def _train(self, command: Start) -> None:
        """Lets a replica train; the first time in a rollout it is told what from."""
        message = Message("train", {"term": command.term})
        if self._start is not None and command.replica not in self._has_start:
            self._has_start.add(command.replica)
            names, arrays = tensor_arrays(self._start)
            message = Message("train", {"term": command.term, "tensors": names}, arrays)
        self._ask(command.replica, message)

    def _stop(self, command: Stop) -> None:
        answer = self._ask(command.replica, Message("stop_training"))
        now = time.monotonic()
        if answer is None:
            self._do(self.coordinator.lost(command.replica, now))
            return
        fields = answer.fields
        counting = self._counting
        counting.seconds += fields["seconds"]
        counting.waited += fields["waited"]
        counting.longest_wait = max(counting.longest_wait, fields["longest_wait"])
        self.pool.note_trained(fields["seconds"])
        self._tokens[command.replica] = fields["tokens"]
        self._updates[command.replica] = fields["updates"]
        learned = fields["tokens"] > 0
        self._do(self.coordinator.answered(command.replica, command.term, learned, now))

    def _collect(self, command: Collect) -> None:
        """Takes the mean of the weights of those who learned, as far as they are still there."""
        trained: dict[int, Trained] = {}
        for replica in command.replicas:
            answer = self._ask(replica, Message("trained_drafter"))
            if answer is not None:
                weights = read_tensors(answer.fields["tensors"], answer.arrays)
                trained[replica] = (weights, self._tokens[replica])
        if not trained:
            return
        self._counting.weights = weighted_mean(list(trained.values()))
        self._counting.tokens = sum(tokens for _, tokens in trained.values())
        self._counting.updates = sum(self._updates[replica] for replica in trained)
        self._counting.replicas = len(trained)

    def _ask(self, replica: int, message: Message) -> Message | None:
        """Returns the answer; None: there is nobody, or the one who was asked is gone."""
        client = self.pool.replicas[replica].client
        try:
            return client.ask(message) if client is not None else None
        except WorkerFailed:  # given up, or the pool was closed
            return None


def weighted_mean(trained: Sequence[Trained]) -> dict[str, torch.Tensor]:
    """Returns the mean of weights, each counted by the tokens that it rests on, in their own types."""
    whole = sum(tokens for _, tokens in trained)
    mean = {}
    for name, tensor in trained[0][0].items():
        total = sum(weights[name].double() * (tokens / whole) for weights, tokens in trained)
        assert isinstance(total, torch.Tensor)
        mean[name] = total.to(tensor.dtype)
    return mean
