"""Replicas without work train while others finish, stop for work at once, and are averaged once."""

import json
import os
import signal
import threading
import time
from dataclasses import dataclass, field, replace

import pytest
import torch

from paceline.cluster.idle import Activity, IdleClock
from paceline.cluster.idle_training import IdleTraining, weighted_mean
from paceline.cluster.pool import ReplicaPool
from paceline.types import Request, SamplingParams
from paceline.worker.codec import tensor_arrays
from paceline.worker.process import Launch, WorkerFailed, WorkerProcess
from paceline.worker.training_time import TrainingTime
from paceline.worker.wire import Message
from tests.cluster.test_pool import ENDLESS, PATIENT, is_running, pids, wait_for, wait_until_ready


def request(name: str, tokens: int) -> Request:
    return Request(name, (1, 2), 7, SamplingParams(max_tokens=tokens))


def test_a_mean_counts_by_tokens_and_keeps_types():
    trained = [
        ({"w": torch.tensor([0.0, 2.0], dtype=torch.bfloat16)}, 1.0),
        ({"w": torch.tensor([4.0, 6.0], dtype=torch.bfloat16)}, 3.0),
    ]
    mean = weighted_mean(trained)["w"]
    assert mean.tolist() == [3.0, 5.0] and mean.dtype == torch.bfloat16


def test_only_the_end_of_a_slice_is_waited_for():
    times = TrainingTime()
    times.note(began=10.0, ended=12.0, came=None)
    times.note(began=12.0, ended=15.0, came=14.5)
    times.note(began=15.0, ended=15.25, came=14.0)  # it was there before this stretch began
    assert (times.seconds, times.waited, times.longest_wait) == (5.25, 0.75, 0.5)


def test_idle_time_that_was_used_is_told_apart(monkeypatch):
    clock = iter([0.0, 0.0, 10.0, 20.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    idle = IdleClock()
    idle.note(2, 2, True)
    idle.note(2, 1, True)
    idle.note(2, 0, False)
    idle.note_trained(6.0)
    assert idle.take_shares() == (10 / 40, 4 / 40)
    assert idle.take_shares() == (0.0, 0.0)


# -- without processes ---------------------------------------------------------------------------------------


@dataclass
class Client:
    """A worker's client that answers at once; `gone`: not at all, `failed`: it was given up."""

    value: float
    tokens: float = 100.0
    gone: bool = False
    failed: bool = False
    asked: list[str] = field(default_factory=list)
    starts: list[float | None] = field(default_factory=list)  # of each time that it was to train

    def ask(self, message: Message) -> Message | None:
        self.asked.append(message.kind)
        if message.kind == "train":
            self.starts.append(message.arrays[0].item() if message.arrays else None)
        if self.failed:
            raise WorkerFailed("given up")
        if self.gone:
            return None
        if message.kind == "trained_drafter":
            names, arrays = tensor_arrays({"w": torch.tensor([self.value])})
            return Message("done", {"tensors": names}, arrays)
        times = {"seconds": 2.0, "waited": 0.25, "longest_wait": 0.125}
        return Message("done", {"tokens": self.tokens, "updates": 3, **times})


@dataclass
class Replica:
    """A replica of nothing but its client."""

    client: Client


class Pool:
    """A pool whose replicas do what the test says."""

    def __init__(self, *clients: Client) -> None:
        self.replicas = [Replica(client) for client in clients]
        self.trained = 0.0

    def changed_state(self) -> None:
        pass

    def note_trained(self, seconds: float) -> None:
        self.trained += seconds


def look(training: IdleTraining, *busy: bool, ready: tuple[bool, ...] = (), waiting: bool = False) -> None:
    training.look(Activity(list(ready or (True,) * len(busy)), list(busy), waiting, 0))


def test_who_is_free_trains_who_gets_work_stops_and_the_mean_is_taken_once():
    first, second, third = clients = Client(1.0), Client(4.0, tokens=300.0), Client(9.0)
    pool = Pool(*clients)
    training = IdleTraining(pool)
    look(training, True, False, False)
    assert not first.asked + second.asked + third.asked, "an evaluation: nobody trains"
    training.begin_rollout()
    look(training, False, False, False)
    assert not first.asked + second.asked, "nor before there is work"
    look(training, True, True, True)
    look(training, False, False, True, waiting=True)
    assert not first.asked + second.asked, "work waits that they could take"
    look(training, False, False, True)
    assert first.asked == second.asked == ["train"] and not third.asked
    look(training, True, False, True)
    assert first.asked == ["train", "stop_training"], "without its weights: it generates"
    assert training.take(0.0) is None, "the rollout goes on"
    training.end_rollout()
    assert training.take(0.0) is None, "and its end is not known yet"
    look(training, False, False, False)
    learned = training.take(0.0)
    assert first.asked[2:] == ["trained_drafter"]
    assert second.asked == ["train", "stop_training", "trained_drafter"] and not third.asked
    assert learned.weights["w"].item() == pytest.approx((1.0 * 100 + 4.0 * 300) / 400)
    assert (learned.tokens, learned.updates, learned.replicas) == (400.0, 6, 2)
    assert (learned.seconds, learned.waited, learned.longest_wait) == (4.0, 0.5, 0.125)
    assert pool.trained == 4.0
    assert training.take(0.0) is None, "once"
    look(training, True, False, False)
    assert second.asked[-1] == "trained_drafter", "the rollout is over"


@pytest.mark.parametrize("how", ["gone", "failed"])
@pytest.mark.parametrize("when", ["training", "answered"])
def test_who_is_lost_takes_along_what_it_learned_and_no_more(how, when):
    lost, other, busy = clients = Client(1.0), Client(4.0), Client(0.0)
    training = IdleTraining(Pool(*clients))
    training.begin_rollout()
    look(training, True, True, True)
    look(training, False, False, True)
    if when == "answered":
        look(training, True, False, True)
        assert lost.asked == ["train", "stop_training"]
    setattr(lost, how, True)
    training.end_rollout()
    look(training, False, False, False)
    learned = training.take(0.0)
    assert learned.weights["w"].item() == 4.0 and learned.replicas == 1 and learned.tokens == 100.0
    assert busy.asked == []
    training.begin_rollout()
    look(training, True, False, True, ready=(True, False, True))
    training.end_rollout()
    look(training, False, False, False, ready=(True, False, True))
    assert training.take(0.0).weights == {}, "nobody trained"


def test_every_replica_is_told_once_a_rollout_what_to_begin_from():
    first, second, busy = clients = Client(1.0), Client(4.0), Client(0.0)
    training = IdleTraining(Pool(*clients))
    for start in ({"w": torch.tensor([7.0])}, {"w": torch.tensor([8.0])}, None):
        training.begin_rollout(start)
        look(training, True, True, True)
        for _ in range(2):  # work comes, and is done
            look(training, False, False, True)
            look(training, True, False, True)
        look(training, False, False, True, ready=(True, False, True))
        look(training, False, False, True)  # another process in its place
        training.end_rollout()
        look(training, False, False, False)
    assert first.starts == [7.0, None, None, 8.0, None, None, None, None, None]
    assert second.starts == [7.0, 7.0, 8.0, 8.0, None, None] and not busy.starts


def test_a_rollout_that_begins_anew_starts_from_nothing():
    """Where low precision failed, a step is rolled out again before anything was taken."""
    client, busy = Client(1.0), Client(0.0)
    training = IdleTraining(Pool(client, busy))
    for _ in range(2):
        training.begin_rollout()
        look(training, True, True)
        look(training, False, True)
        training.end_rollout()
    training.begin_rollout()  # the thread saw neither the end nor that this is another one
    look(training, False, True)
    training.end_rollout()
    look(training, False, False)
    assert training.take(0.0).seconds == 2.0


# -- with processes ------------------------------------------------------------------------------------------


LATE = 3.0  # seconds: longer than processes take to end


class LatePool(ReplicaPool):
    """A pool whose threads take their time to end."""

    def next_requests(self, replica):
        requests = super().next_requests(replica)
        time.sleep(0.0 if requests else LATE)
        return requests

    def activity(self, seconds, seen):
        activity = super().activity(seconds, seen)
        time.sleep(0.0 if activity else LATE)
        return activity


def make_pool(tmp_path, place=WorkerProcess, patience=PATIENT, kind=ReplicaPool, **more) -> ReplicaPool:
    """Two replicas that train when they are idle."""
    settings = {"seconds": 0.005, "notes": str(tmp_path / "published"), "die_training": str(tmp_path / "die")}
    settings |= more
    launch = Launch("tests.cluster.training_backend:make", json.dumps(settings))
    pool = kind(launch, [place] * 2, 8, lambda: [("w", torch.tensor([0.0]))], patience=patience)
    pool.update_weights(1)
    return pool


def test_closing_waits_for_the_threads_of_a_pool(tmp_path):
    """One that is still there when the interpreter ends is stopped wherever it is."""
    before = set(threading.enumerate())
    pool = make_pool(tmp_path, kind=LatePool)
    wait_until_ready(pool)
    pool.close()
    assert not set(threading.enumerate()) - before


@pytest.mark.slow
def test_closing_ends_threads_that_wait_for_a_process(tmp_path):
    """One hands a request to a process that does not read, one waits for the answer of another."""
    before = set(threading.enumerate())
    pool = make_pool(tmp_path, patience=replace(PATIENT, close=1.0))
    wait_until_ready(pool)
    pool.idle_training.begin_rollout()
    processes = [replica.client.worker.process for replica in pool.replicas]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    pool.submit([Request("long", (1,) * 1_000_000, 7, SamplingParams(max_tokens=2))])
    wait_for(lambda: any(replica.client.answers for replica in pool.replicas))
    wait_for(lambda: any(replica.client.worker.connection._sending.locked() for replica in pool.replicas))
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(60)
    for process in processes:
        process.kill()
    assert not closing.is_alive() and not set(threading.enumerate()) - before


@pytest.fixture
def pool(tmp_path):
    """Two replicas; no process is started while `may_start` is not set."""
    may_start = threading.Event()
    may_start.set()

    def place(launch, weights):
        assert may_start.wait(300)
        return WorkerProcess(launch, weights)

    made = make_pool(tmp_path, place)
    made.notes, made.die, made.may_start = tmp_path / "published", tmp_path / "die", may_start
    yield made
    workers = pids(made)
    made.close()
    assert not any(is_running(pid) for pid in workers)


def train_beside_a_long_one(pool: ReplicaPool, step: int) -> None:
    """Submits a request without an end and a short one, and returns when the replica that is free trains."""
    wait_until_ready(pool)
    trained = pool.notes.with_name("trained")
    trained.unlink(missing_ok=True)
    pool.submit([request(f"long{step}", ENDLESS), request(f"short{step}", 2)])
    first = next(iter(pool.completions()))
    assert first.request.id == f"short{step}"
    wait_for(trained.exists)


def end_the_long_one(pool: ReplicaPool, step: int) -> None:
    """Ends the rollout."""
    pool.abort([f"long{step}"])
    assert [c.request.id for c in pool.completions()] == [f"long{step}"]
    pool.idle_training.end_rollout()


@pytest.mark.slow
def test_idle_replicas_train_stop_for_work_and_are_averaged_once(pool):
    training = pool.idle_training
    for step in (1, 2):
        training.begin_rollout()
        train_beside_a_long_one(pool, step)
        free = next(replica for replica in pool.replicas if not replica.outstanding)
        began = time.monotonic()
        pool.submit([request(f"late{step}", 1)])
        late = next(iter(pool.completions()))
        seconds = time.monotonic() - began
        # Nobody but who waits ends a slice here, or it is killed; less is for what a busy machine needs.
        assert late.request.id == f"late{step}" and seconds < PATIENT.answer, "work waited for training"
        assert free.client.restarts == 0
        end_the_long_one(pool, step)
        learned = training.take(120.0)
        assert learned.tokens > 0 and learned.replicas == 1 and 0 < learned.seconds < 120
        assert 0 < learned.longest_wait < PATIENT.answer
        pool.speculation.publish_drafter(step, learned.weights)
        shares = pool.take_stats().replicas
        assert 0 <= shares.unused_share < shares.idle_share < 1
    wait_until_ready(pool)
    assert training.quality({"head": torch.ones(2)}) == 2.0
    published = [json.loads(line) for line in pool.notes.read_text().splitlines()]
    # Every replica is told once per step, and training goes on from what was published.
    assert [entry["head"] for entry in published] == [[1.0, 1.0]] * 2 + [[2.0, 2.0]] * 2


@pytest.mark.slow
def test_a_replica_that_cannot_train_generates_and_is_not_asked_to(tmp_path):
    """It has less memory than others; that is known only where it was planned."""
    together = threading.Lock()

    def one_by_one(launch, weights):
        with together:
            worker = WorkerProcess(launch, weights)
            wait_for((tmp_path / "first").exists)
            return worker

    pool = make_pool(tmp_path, one_by_one, no_room=str(tmp_path / "first"))
    try:
        wait_until_ready(pool)
        assert sorted(replica.trains for replica in pool.replicas) == [False, True]
        pool.idle_training.begin_rollout()
        pool.submit([request(f"long{number}", ENDLESS) for number in range(2)])
        wait_for(lambda: all(len(replica.outstanding) == 1 for replica in pool.replicas))
        longest = {replica.trains: [*replica.outstanding][0] for replica in pool.replicas}
        pool.abort([longest[False]])  # who is free now cannot train
        assert next(iter(pool.completions())).request.id == longest[False]
        time.sleep(0.3)
        assert not (tmp_path / "trained").exists()
        pool.abort([longest[True]])
        assert next(iter(pool.completions())).request.id == longest[True]
        pool.idle_training.end_rollout()
        assert pool.idle_training.quality({"head": torch.ones(2)}) is None and pool.restarts == 0
    finally:
        pool.close()


@pytest.mark.slow
def test_a_worker_killed_while_it_trains_costs_what_it_learned_and_nothing_else(pool):
    training = pool.idle_training
    training.begin_rollout()
    train_beside_a_long_one(pool, 1)
    before = set(pids(pool))
    pool.may_start.clear()  # the next one might train before the rollout is over
    pool.die.touch()
    wait_for(lambda: pool.restarts == 1)
    end_the_long_one(pool, 1)
    learned = training.take(120.0)
    assert learned is not None and learned.weights == {}
    pool.may_start.set()
    wait_until_ready(pool)
    assert pool.restarts == 1 and len(set(pids(pool)) - before) == 1 and os.getpid() not in pids(pool)
    assert not pool.num_retried, "it had no request"
    training.begin_rollout()
    train_beside_a_long_one(pool, 2)
    end_the_long_one(pool, 2)
    assert training.take(120.0).tokens > 0, "and goes on with the next rollout"
