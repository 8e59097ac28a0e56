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
from paceline.cluster.replica import Replica
from paceline.drafting.online import Learned
from paceline.worker.codec import read_tensors
from paceline.worker.process import WorkerFailed
from paceline.worker.wire import Message

LOOK_SECONDS = 1.0
Trained = tuple[Mapping[str, torch.Tensor], float]  # weights, and the tokens that they rest on


class Pool(Protocol):
    """The pool, as training sees it."""

    replicas: list[Replica]

    def activity(self, seconds: float, seen: int) -> Activity | None:
        """Waits up to `seconds` for a change after the `seen` ones; None: the pool is closed."""

    def changed_state(self) -> None:
        """Wakes all waiting threads to reread the state."""

    def note_trained(self, seconds: float) -> None:
        """Records how many seconds of its idle time a replica trained for."""

    def ask_all(self, message: Message) -> list[tuple[Replica, Message]]:
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
        now = time.monotonic()
        coordinator = self.coordinator
        current = self._open
        if current != self._followed and self._followed is not None:
            self._do(coordinator.rollout_over(now))
        if current != self._followed and current is not None:
            self._begin(now)
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
        self._do(coordinator.tick(now))
        if current != self._followed:
            self._settle(current)

    def _begin(self, now: float) -> None:
        self._counting = Learned()
        self._answers.clear()
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
                    self._ask(command.replica, Message("train", {"term": command.term}))
                case Stop():
                    self._stop(command)
                case Collect():
                    self._collect(command)

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
        self.pool.note_trained(fields["seconds"])
        self._answers[command.replica] = fields
        learned = fields["tokens"] > 0
        self._do(self.coordinator.answered(command.replica, command.term, learned, now))

    def _collect(self, command: Collect) -> None:
        """Averages the weights of the replicas that learned and are still alive."""
        trained: dict[int, Trained] = {}
        for replica in command.replicas:
            answer = self._ask(replica, Message("trained_drafter"))
            if answer is not None:
                weights = read_tensors(answer.fields["tensors"], answer.arrays)
                trained[replica] = (weights, self._answers[replica]["tokens"])
        if not trained:
            return
        self._counting.weights = weighted_mean(list(trained.values()))
        self._counting.tokens = sum(tokens for _, tokens in trained.values())
        said = [self._answers[replica] for replica in trained]
        updates = sum(fields["updates"] for fields in said)
        self._counting.updates = updates
        # What one of them saw on average, as often as one of them looked.
        seen = sum(fields["overlap"] for fields in said) / max(1, updates)
        self._counting.overlaps = [seen] * max(1, updates // len(trained))
        self._counting.replicas = len(trained)

    def _ask(self, replica: int, message: Message) -> Message | None:
        """Calls a replica and returns its answer; None if the replica is gone or lost before it answers."""
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
