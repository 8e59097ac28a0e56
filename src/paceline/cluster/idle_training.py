"""The coordinator's commands carried out: replicas that ran out of work train the drafter on what they have.

    run's thread    begin_rollout ─────────────── end_rollout ── (the policy learns) ── take ──▶ publishes
    own thread              │  idle replicas: train    │  stop all, fetch weights, mean
                            │  those with work: stop   │

The run signals when a rollout begins and ends; within it a thread looks at what replicas do whenever that
changes, informs the coordinator, and sends its commands. It never delays a rollout: a worker that trains
stops by itself when work arrives, before it is told to, and weights are fetched when the rollout is over.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from paceline.cluster.coordinator import Collect, Command, Coordinator, Start, State, Stop
from paceline.cluster.idle import Activity
from paceline.drafting.remote_online import Learned
from paceline.worker.client import WorkerClient
from paceline.worker.codec import tensors_message, tensors_of
from paceline.worker.process import WorkerFailed
from paceline.worker.wire import Message

LOOK_SECONDS = 1.0
Trained = tuple[Mapping[str, torch.Tensor], float]  # weights, and the tokens that they rest on


class Pool(Protocol):
    """The pool, as training sees it."""

    replicas: list[WorkerClient]

    def activity(self, seconds: float, seen: int) -> Activity | None:
        """Waits up to `seconds` for a change after the `seen` ones; None: the pool is closed."""

    def changed_state(self) -> None:
        """Wakes all waiting threads to reread the state."""

    def note_trained(self, seconds: float) -> None:
        """Records how many seconds of its idle time a replica trained for."""

    def ask_all(self, message: Message) -> list[tuple[WorkerClient, Message]]:
        """Returns the answers of the replicas that are ready."""


class IdleTraining:
    """Drafter training on the idle replicas of a pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.coordinator = Coordinator(len(pool.replicas))
        self._changed = threading.Condition()
        self._rollouts = 0  # that were begun
        self._open: int | None = None  # the current rollout; None: it is over
        self._followed: int | None = None  # that the coordinator knows of
        self._ended = False
        self._learned: Learned | None = None  # of the last rollout, until it is taken
        self._counting = Learned()
        self._start: Mapping[str, torch.Tensor] | None = None  # of the current rollout
        self._has_start: set[int] = set()  # replicas that have received it
        self._tokens: dict[int, float] = {}  # by replica, in this rollout
        self._updates: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begins to watch the pool, until it is closed."""
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Waits up to `seconds` for its thread to end; the pool and its clients are closed."""
        self._thread.join(seconds)

    # -- the run's thread -------------------------------------------------------------------------

    def begin_rollout(self, start: Mapping[str, torch.Tensor] | None = None) -> None:
        """Lets idle replicas train from now on, from `start` or the published head."""
        self._rollouts += 1
        self._start = start
        self._open = self._rollouts
        self.pool.changed_state()

    def end_rollout(self) -> None:
        """Stops all training without waiting for it."""
        self._open = None
        self.pool.changed_state()

    def take(self, seconds: float) -> Learned | None:
        """Returns what the last rollout's idle time learned; None: not within `seconds`, or nothing."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._followed == self._open, seconds)
            learned, self._learned = self._learned, None
            return learned

    def quality(self, weights: Mapping[str, torch.Tensor]) -> float | None:
        """Returns how well a head of these weights drafts along the replicas' newest texts; None: no text."""
        answers = self.pool.ask_all(tensors_message("judge_drafter", weights))
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
        """Starts training on a replica; the first time in a rollout with the weights to start from."""
        message = Message("train", {"term": command.term})
        if self._start is not None and command.replica not in self._has_start:
            self._has_start.add(command.replica)
            message = tensors_message("train", self._start, term=command.term)
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
        """Averages the weights of the replicas that learned and are still alive."""
        trained: dict[int, Trained] = {}
        for replica in command.replicas:
            answer = self._ask(replica, Message("trained_drafter"))
            if answer is not None:
                trained[replica] = (tensors_of(answer), self._tokens[replica])
        if not trained:
            return
        self._counting.weights = weighted_mean(list(trained.values()))
        self._counting.tokens = sum(tokens for _, tokens in trained.values())
        self._counting.updates = sum(self._updates[replica] for replica in trained)
        self._counting.replicas = len(trained)

    def _ask(self, replica: int, message: Message) -> Message | None:
        """Calls a replica and returns its answer; None if the replica is gone or lost before it answers."""
        try:
            return self.pool.replicas[replica].ask(message)
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
