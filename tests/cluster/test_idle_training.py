"""Replicas without work train while others finish, stop for work at once, and are averaged once."""

import json
import random
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
from paceline.worker.codec import tensors_message
from paceline.worker.process import Launch, WorkerFailed, WorkerProcess
from paceline.worker.wire import Message
from tests.cluster.test_pool import PATIENT, wait_for, wait_until_ready


def test_weighted_mean_counts_by_tokens_and_keeps_types():
    trained = [
        ({"w": torch.tensor([0.0, 2.0], dtype=torch.bfloat16)}, 1.0),
        ({"w": torch.tensor([4.0, 6.0], dtype=torch.bfloat16)}, 3.0),
    ]
    mean = weighted_mean(trained)["w"]
    assert mean.tolist() == [3.0, 5.0] and mean.dtype == torch.bfloat16


def test_idle_clock_reports_idle_time_with_and_without_training(monkeypatch):
    clock = iter([0.0, 0.0, 10.0, 20.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    idle = IdleClock()
    idle.note(2, 2, True)
    idle.note(2, 1, True)
    idle.note(2, 0, False)
    idle.note_trained(6.0)
    assert idle.take_shares() == (10 / 40, 4 / 40)
    assert idle.take_shares() == (0.0, 0.0)


@dataclass
class Client:
    """A worker's client that answers at once; `gone`: not at all, `failed`: it was given up."""

    value: float
    tokens: float = 100.0
    gone: bool = False
    failed: bool = False
    asked: list[str] = field(default_factory=list)

    def ask(self, message: Message) -> Message | None:
        self.asked.append(message.kind)
        if self.failed:
            raise WorkerFailed("given up")
        if self.gone:
            return None
        if message.kind == "trained_drafter":
            return tensors_message("done", {"w": torch.tensor([self.value])})
        return Message(
            "done", {"tokens": self.tokens, "updates": 3, "overlap": 1.5, "seconds": 2.0, "waited": 0.25}
        )


class Pool:
    """A pool whose replicas do what the test says."""

    def __init__(self, *clients: Client) -> None:
        self.replicas = list(clients)
        self.trained = 0.0

    def changed_state(self) -> None:
        pass

    def note_trained(self, seconds: float) -> None:
        self.trained += seconds


def look(training: IdleTraining, *busy: bool, ready: tuple[bool, ...] = (), waiting: bool = False) -> None:
    training.look(Activity(list(ready or (True,) * len(busy)), list(busy), waiting, 0))


def test_idle_replicas_train_until_they_get_work_and_are_averaged_once():
    first, second, third = clients = Client(1.0), Client(4.0, tokens=300.0), Client(9.0)
    pool = Pool(*clients)
    training = IdleTraining(pool)
    look(training, True, False, False)
    assert not first.asked + second.asked + third.asked, "an evaluation: no replica trains"
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
    assert training.take(0.0) is None, "the rollout is not over"
    training.end_rollout()
    assert training.take(0.0) is None, "and its end is not known yet"
    look(training, False, False, False)
    learned = training.take(0.0)
    assert first.asked[2:] == ["trained_drafter"]
    assert second.asked == ["train", "stop_training", "trained_drafter"] and not third.asked
    assert learned.weights["w"].item() == pytest.approx((1.0 * 100 + 4.0 * 300) / 400)
    assert (learned.tokens, learned.updates, learned.replicas) == (400.0, 6, 2)
    assert (learned.seconds, learned.waited) == (4.0, 0.5)
    assert learned.overlaps == [0.5] * 3, "what one replica saw on average, as often as one looked"
    assert pool.trained == 4.0
    assert training.take(0.0) is None, "once"
    look(training, True, False, False)
    assert second.asked[-1] == "trained_drafter", "the rollout is over"


@pytest.mark.parametrize("how", ["gone", "failed"])
@pytest.mark.parametrize("when", ["training", "answered"])
def test_averaging_drops_what_a_lost_replica_learned_and_no_more(how, when):
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
    assert training.take(0.0).weights == {}, "no replica trained"


@pytest.mark.parametrize("seed", range(20))
def test_replicas_train_only_while_idle_whatever_happens_in_which_order(seed):
    """And what is averaged is of those that are left."""
    rng = random.Random(seed)
    clients = [Client(float(number), tokens=100.0) for number in range(4)]
    training = IdleTraining(Pool(*clients))
    for _ in range(60):
        if rng.random() < 0.2:
            (training.end_rollout if training._open else training.begin_rollout)()
        ready = tuple(rng.random() < 0.9 for _ in clients)
        for client, here in zip(clients, ready, strict=True):
            client.gone = not here
        busy = [here and rng.random() < 0.5 for here in ready]
        sent = [len(client.asked) for client in clients]
        look(training, *busy, ready=ready, waiting=rng.random() < 0.2)
        assert all(ready[number] and not busy[number] for number in training.training)
        begun = [c for c, known in zip(clients, sent, strict=True) if "train" in c.asked[known:]]
        assert not begun or any(busy), "while others generate"
        learned = training.take(0.0)
        if learned is not None and learned.weights:
            assert 0 <= learned.weights["w"].item() <= 3 and learned.tokens == 100.0 * learned.replicas


@pytest.mark.slow
def test_pool_close_ends_threads_that_wait_for_a_process():
    """One hands a request to a process that does not read, one waits for the answer of another."""
    before = set(threading.enumerate())
    settings = {"seconds": 0.005}
    launch = Launch("tests.cluster.training_backend:make", json.dumps(settings))
    weights = [("w", torch.tensor([0.0]))]
    pool = ReplicaPool(launch, [WorkerProcess] * 2, 8, lambda: weights, patience=replace(PATIENT, close=1.0))
    pool.update_weights(1)
    wait_until_ready(pool)
    pool.idle_training.begin_rollout()
    processes = [replica.worker.process for replica in pool.replicas]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    pool.submit([Request("long", (1,) * 1_000_000, 7, SamplingParams(max_tokens=2))])
    wait_for(lambda: any(replica.answers for replica in pool.replicas))
    wait_for(lambda: any(replica.worker.connection._sending.locked() for replica in pool.replicas))
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(60)
    for process in processes:
        process.kill()
    assert not closing.is_alive() and not set(threading.enumerate()) - before
