"""Which replicas train the drafter in idle time: the state of every replica, and what to do next.

                    work ┌────────────────────────────┐
                         ▼                            │ work: Stop
    IDLE ──work──▶ GENERATING ──none left──▶ RELEASED ──Start──▶ TRAINING
     ▲                                           │ rollout over      │ rollout over: Stop
     └────────── next step ────── DONE ◀─────────┴──acknowledged─────┘

A replica that ran out of work while others finish their tail is released, and a released one trains until
work arrives or the rollout is over. When all that trained have answered or are lost, their results are
collected once. Optimisers stay where they are.

Nothing here waits, sends or looks at a clock: events go in with their time, commands come out. So every order
of events can be tested (`tests/cluster/test_coordinator.py`). A *term* numbers the periods of training: an
answer of an earlier term, or of a replica that was lost meanwhile, is dropped.
"""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """What a replica does."""

    IDLE = "idle"  # the step has begun and it has had no work yet
    GENERATING = "generating"
    RELEASED = "released"  # it ran out of work, others have not
    TRAINING = "training"
    DONE = "done"  # the rollout is over
    LOST = "lost"  # being replaced


@dataclass(frozen=True)
class Start:
    """Makes a replica train until it is stopped or given work."""

    replica: int
    term: int


@dataclass(frozen=True)
class Stop:
    """Makes a replica stop training and return what it learned."""

    replica: int
    term: int


@dataclass(frozen=True)
class Collect:
    """Averages the heads of these replicas."""

    replicas: tuple[int, ...]
    term: int


Command = Start | Stop | Collect


@dataclass
class _Member:
    state: State = State.DONE
    heard: float = 0.0
    term: int = 0  # in which it was started last
    owes: bool = False  # an answer to a `Stop`
    learned: bool = False  # in this step, and has answered


class Coordinator:
    """The states of all replicas over the steps of a run."""

    def __init__(self, replicas: int, silence: float = 60.0) -> None:
        """A training replica without a sign of life for `silence` seconds counts as lost."""
        self.silence = silence
        self.members = [_Member() for _ in range(replicas)]
        self.term = 0
        self._over = True
        self._collected = True

    # -- what happened -------------------------------------------------------------------------------

    def begin_step(self, now: float) -> list[Command]:
        """A rollout begins; earlier training has been collected, late answers are dropped."""
        self.term += 1
        self._over = False
        self._collected = False
        for member in self.members:
            member.owes = member.learned = False
            if member.state is not State.LOST:
                member.state = State.IDLE
                member.heard = now
        return []

    def has_work(self, replica: int, now: float) -> list[Command]:
        """A replica was given requests; one that trains must stop at once."""
        member = self._heard(replica, now)
        if member.state is State.LOST or self._over:
            return []
        trained = member.state is State.TRAINING
        member.state = State.GENERATING
        return [self._stop(replica)] if trained else []

    def ran_out(self, replica: int, now: float) -> list[Command]:
        """A replica has no requests left, and none are queued for it."""
        member = self._heard(replica, now)
        if self._over or member.state not in (State.IDLE, State.GENERATING):
            return []
        member.state = State.RELEASED
        return self._start_released()

    def answered(self, replica: int, term: int, learned: bool, now: float) -> list[Command]:
        """A replica has stopped training; `learned`: its head has changed."""
        member = self._heard(replica, now)
        if not member.owes or term != member.term or member.state is State.LOST:
            return []
        member.owes = False
        member.learned = member.learned or learned
        if self._over:
            member.state = State.DONE
        return [*self._start_released(), *self._collect_if_due()]

    def heartbeat(self, replica: int, now: float) -> list[Command]:
        self._heard(replica, now)
        return []

    def lost(self, replica: int, now: float) -> list[Command]:
        """A replica is gone, with what it learned."""
        member = self._heard(replica, now)
        member.state = State.LOST
        member.owes = member.learned = False
        return self._collect_if_due()

    def came_back(self, replica: int, now: float) -> list[Command]:
        """Another process has taken a lost replica's place."""
        member = self._heard(replica, now)
        if member.state is State.LOST:
            member.state = State.DONE if self._over else State.IDLE
        return []

    def rollout_over(self, now: float) -> list[Command]:
        """The last response of the step has arrived: all replicas stop."""
        if self._over:
            return []
        self._over = True
        commands: list[Command] = []
        for replica, member in enumerate(self.members):
            if member.state is State.TRAINING:
                commands.append(self._stop(replica))
            if member.state is not State.LOST:
                member.state = State.DONE
        return commands + self._collect_if_due()

    def tick(self, now: float) -> list[Command]:
        """Time has passed: a replica that trains or owes an answer and has been silent too long is lost."""
        commands: list[Command] = []
        for replica, member in enumerate(self.members):
            waited_for = member.owes or member.state is State.TRAINING
            if waited_for and now - member.heard > self.silence:
                commands += self.lost(replica, now)
        return commands

    # -- what follows --------------------------------------------------------------------------------

    def states(self) -> list[State]:
        return [member.state for member in self.members]

    def _heard(self, replica: int, now: float) -> _Member:
        member = self.members[replica]
        member.heard = max(member.heard, now)
        return member

    def _stop(self, replica: int) -> Stop:
        member = self.members[replica]
        member.owes = True
        return Stop(replica, member.term)

    def _start_released(self) -> list[Command]:
        """Starts every released replica that owes no answer, while others generate."""
        if self._over:
            return []
        commands: list[Command] = []
        for replica, member in enumerate(self.members):
            if member.state is State.RELEASED and not member.owes:
                member.state = State.TRAINING
                member.term = self.term
                commands.append(Start(replica, self.term))
        return commands

    def _collect_if_due(self) -> list[Command]:
        if not self._over or self._collected or any(member.owes for member in self.members):
            return []
        self._collected = True
        learned = tuple(replica for replica, member in enumerate(self.members) if member.learned)
        return [Collect(learned, self.term)] if learned else []
