"""The coordinator under every order of events: no lost wake-up, everything collected once."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.cluster.coordinator import Collect, Coordinator, Start, State, Stop

COUNT = 4
REPLICA = st.integers(0, COUNT - 1)


class AnyOrder(RuleBasedStateMachine):
    """Replicas that get work, run out of it, die and come back, and answer late or never.

    The model beside it knows what is true of the processes: who has work, who trains, who owes an answer.
    """

    def __init__(self):
        super().__init__()
        self.coordinator = Coordinator(COUNT, silence=5.0)
        self.now = 0.0
        self.over = True
        self.has_work = [False] * COUNT
        self.alive = [True] * COUNT
        self.trains = [None] * COUNT  # the term that a process trains for
        self.unanswered = [[] for _ in range(COUNT)]  # terms of stops that its process will answer
        self.learned = set()  # in this step, answered in time and not lost since
        self.collects = []
        self.begun_terms = []

    def apply(self, commands):
        for command in commands:
            if isinstance(command, Start):
                assert self.alive[command.replica] and not self.has_work[command.replica] and not self.over
                assert self.trains[command.replica] is None, "started twice"
                self.trains[command.replica] = command.term
            elif isinstance(command, Stop):
                assert self.trains[command.replica] == command.term, "stopped, and did not train"
                self.trains[command.replica] = None
                self.unanswered[command.replica].append(command.term)
            else:
                assert isinstance(command, Collect) and self.over
                assert set(command.replicas) == self.learned
                assert all(term is None for term in self.trains), "collected while a replica trains"
                self.collects.append(command.term)

    @rule()
    @precondition(lambda self: self.over)
    def begin(self):
        self.over = False
        self.has_work = [False] * COUNT
        self.learned = set()
        self.trains = [None] * COUNT
        self.apply(self.coordinator.begin_step(self.now))
        self.begun_terms.append(self.coordinator.term)

    @rule(replica=REPLICA)
    @precondition(lambda self: not self.over)
    def work(self, replica):
        if self.alive[replica]:
            self.has_work[replica] = True
            trained = self.trains[replica] is not None
            commands = self.coordinator.has_work(replica, self.now)
            assert [type(c) for c in commands] == ([Stop] if trained else []), "a lost wake-up"
            self.apply(commands)

    @rule(replica=REPLICA)
    @precondition(lambda self: not self.over)
    def run_out(self, replica):
        if self.alive[replica]:
            self.has_work[replica] = False
            self.apply(self.coordinator.ran_out(replica, self.now))
            waits = bool(self.unanswered[replica]) and self.coordinator.members[replica].owes
            assert self.trains[replica] is not None or waits, "released, and does not train"

    @rule(replica=REPLICA, learned=st.booleans())
    def answer(self, replica, learned):
        if self.unanswered[replica]:
            term = self.unanswered[replica].pop(0)
            in_time = term == self.coordinator.term and self.alive[replica]
            if in_time and learned:
                self.learned.add(replica)
            self.apply(self.coordinator.answered(replica, term, learned, self.now))

    @rule(replica=REPLICA)
    def die(self, replica):
        if self.alive[replica]:
            self.alive[replica] = False
            self.forget(replica)
            self.apply(self.coordinator.lost(replica, self.now))

    def forget(self, replica):
        self.trains[replica] = None
        self.has_work[replica] = False
        self.unanswered[replica] = []
        self.learned.discard(replica)

    @rule(replica=REPLICA)
    def come_back(self, replica):
        if not self.alive[replica]:
            self.alive[replica] = True
            self.apply(self.coordinator.came_back(replica, self.now))

    @rule()
    @precondition(lambda self: not self.over)
    def end(self):
        self.over = True
        commands = self.coordinator.rollout_over(self.now)
        for command in commands:
            if isinstance(command, Stop):
                self.apply([command])
        assert all(term is None for term in self.trains), "a replica trains after the rollout"
        self.apply([command for command in commands if isinstance(command, Collect)])

    @rule(replica=REPLICA)
    def beat(self, replica):
        if self.alive[replica]:
            self.apply(self.coordinator.heartbeat(replica, self.now))

    @rule(seconds=st.floats(0.1, 3.0))
    def wait(self, seconds):
        """Processes that are alive are heard of; none of them is taken to be lost."""
        self.now += seconds
        for replica in range(COUNT):
            if self.alive[replica]:
                self.coordinator.heartbeat(replica, self.now)
        self.apply(self.coordinator.tick(self.now))
        assert all(
            state is not State.LOST
            for state, alive in zip(self.coordinator.states(), self.alive, strict=True)
            if alive
        )

    @invariant()
    def states_are_those_of_the_processes(self):
        for replica, state in enumerate(self.coordinator.states()):
            assert (state is State.LOST) == (not self.alive[replica])
            assert (state is State.TRAINING) == (self.trains[replica] is not None)
            if self.has_work[replica] and not self.over:
                assert state is State.GENERATING

    @invariant()
    def everything_is_collected_once(self):
        assert len(set(self.collects)) == len(self.collects)
        owes = any(member.owes for member in self.coordinator.members)
        if self.over and self.begun_terms and not owes and self.learned:
            assert self.coordinator.term in self.collects, "learned, and never collected"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_coordinator_does_not_wait_for_a_trainer_that_falls_silent():
    coordinator = Coordinator(2, silence=5.0)
    coordinator.begin_step(0.0)
    coordinator.has_work(0, 0.0)
    assert coordinator.ran_out(1, 1.0) == [Start(1, 1)]
    assert coordinator.ran_out(0, 2.0) == [Start(0, 1)]
    assert coordinator.rollout_over(3.0) == [Stop(0, 1), Stop(1, 1)]
    assert coordinator.answered(1, 1, True, 4.0) == []
    assert coordinator.tick(7.0) == []
    assert coordinator.tick(8.5) == [Collect((1,), 1)]
    assert coordinator.answered(0, 1, True, 9.0) == [], "too late"
