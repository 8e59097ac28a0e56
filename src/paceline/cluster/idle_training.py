"""Coordinates training in idle time: replicas that ran out of work train the drafter on what they have.

    run's thread    begin_rollout ─────────────── end_rollout ── (the policy learns) ── take ──▶ publishes
    own thread              │  idle replicas: train    │  stop all, fetch weights, mean
                            │  those with work: stop   │

The run signals when a rollout begins and ends; within it a thread looks at what replicas do whenever that
changes, and starts and stops their training. It never delays a rollout: a worker that trains
stops by itself when work arrives, before it is told to, and weights are fetched when the rollout is over.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from paceline.cluster.idle import Activity
from paceline.drafting.online import Learned
from paceline.worker.client import WorkerClient
from paceline.worker.codec import tensors_of
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


class IdleTraining:
    """Drafter training on the idle replicas of a pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.training: set[int] = set()  # replicas that were told to
        self._changed = threading.Condition()
        self._rollouts = 0  # that were begun
        self._open: int | None = None  # the current rollout; None: it is over
        self._followed: int | None = None  # that replicas were told of
        self._ended = False
        self._learned: Learned | None = None  # of the last rollout, until it is taken
        self._counting = Learned()
        self._answers: dict[int, dict] = {}  # what each replica said of this rollout last
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begins to watch the pool, until it is closed."""
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Waits up to `seconds` for its thread to end; the pool and its clients are closed."""
        self._thread.join(seconds)

    # -- the run's thread -------------------------------------------------------------------------

    def begin_rollout(self) -> None:
        """Lets idle replicas train from now on, from the published head."""
        self._rollouts += 1
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
        """Starts and stops training by what the replicas do now."""
        current = self._open
        changed = current != self._followed
        if changed and self._followed is not None:
            for replica in list(self.training):
                self._stop(replica)
            self._collect()
        if changed and current is not None:
            self._counting = Learned()
            self._answers.clear()
        for replica, (ready, busy) in enumerate(zip(activity.ready, activity.busy, strict=True)):
            if not ready:
                self._lost(replica)
            elif busy:
                self._stop(replica)
            elif current is not None and activity.generates and not activity.waiting:
                self._train(replica, current)
        if changed:
            with self._changed:
                if current is None:
                    self._learned = self._counting
                self._followed = current
                self._changed.notify_all()

    def _train(self, replica: int, term: int) -> None:
        if replica not in self.training:
            self.training.add(replica)
            self._ask(replica, Message("train", {"term": term}))

    def _stop(self, replica: int) -> None:
        if replica not in self.training:
            return
        self.training.discard(replica)
        answer = self._ask(replica, Message("stop_training"))
        if answer is None:
            self._lost(replica)
            return
        self._answers[replica] = answer.fields
        self._counting.seconds += answer.fields["seconds"]
        self._counting.waited += answer.fields["waited"]
        self.pool.note_trained(answer.fields["seconds"])

    def _lost(self, replica: int) -> None:
        """A replica is gone, with what it learned."""
        self.training.discard(replica)
        self._answers.pop(replica, None)

    def _collect(self) -> None:
        """Averages the weights of the replicas that learned and are still alive."""
        trained: list[Trained] = []
        counting = self._counting
        overlap = 0.0
        for replica, fields in self._answers.items():
            answer = self._ask(replica, Message("trained_drafter")) if fields["updates"] else None
            if answer is not None:
                trained.append((tensors_of(answer), fields["tokens"]))
                counting.updates += fields["updates"]
                overlap += fields["overlap"]
        if trained:
            counting.weights = weighted_mean(trained)
            counting.tokens = sum(tokens for _, tokens in trained)
            counting.replicas = len(trained)
            # What one of them saw on average, as often as one of them looked.
            counting.overlaps = [overlap / counting.updates] * max(1, counting.updates // len(trained))

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
