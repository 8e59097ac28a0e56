"""A generator in a process of its own: every request ends once, whatever happens to the process."""

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.cluster.pool import UNLIMITED, ReplicaPool
from paceline.records import parse, plain
from paceline.stats import RequestTrace, RolloutStats
from paceline.types import FinishReason, Request, SamplingParams
from paceline.worker.client import Patience
from paceline.worker.codec import (
    REQUESTS_PER_MESSAGE,
    read_requests,
    submit_messages,
)
from paceline.worker.process import Launch, WorkerFailed, WorkerProcess
from paceline.worker.weights import SharedWeights
from paceline.worker.wire import FRAME, MAGIC, MAX_HEADER_BYTES, Connection, Disconnected, Message
from tests.worker.slow_backend import SlowBackend

# Long enough for a machine that pauses: a worker that is killed for it would count as a restart.
PATIENT = Patience(start=300, answer=60, beat=0.2, close=10, restarts=3)


def request(name: str, tokens: int = 5, first: int = 1) -> Request:
    return Request(name, (first, 2), hash_of(name), SamplingParams(max_tokens=tokens))


def hash_of(name: str) -> int:
    return sum(map(ord, name))


@pytest.fixture
def start(tmp_path):
    opened = []

    def make(seconds: float = 0.002, weight: float = 0.0, patience: Patience = PATIENT) -> ReplicaPool:
        settings = json.dumps({"seconds": seconds, "die_once": str(tmp_path / "died")})
        opened.append(
            ReplicaPool(
                Launch("tests.worker.slow_backend:make", settings),
                [WorkerProcess],
                UNLIMITED,
                lambda: [("w", torch.tensor([weight]))],
                patience=patience,
            )
        )
        return opened[-1]

    yield make
    for backend in opened:
        backend.close()
        assert backend.replicas[0].worker.process.returncode is not None


def expected(requests, weight: int = 0):
    backend = SlowBackend(0.0, "")
    backend.update_weights(1, [("w", torch.tensor([weight]))])
    backend.submit(requests)
    return {c.request.id: c.tokens for c in backend.completions()}


def test_client_returns_the_hosted_backends_completions_and_updates_weights(start):
    backend = start()
    backend.update_weights(1, [("w", torch.tensor([3.0, 4.0]))])
    requests = [request(f"r{i}", 3 + i) for i in range(6)]
    backend.submit(requests)
    assert {c.request.id: c.tokens for c in backend.completions()} == expected(requests, 7)
    backend.update_weights(2, [("w", torch.tensor([1.0, 1.0]))])
    backend.submit(requests[:1])
    (completion,) = backend.completions()
    assert completion.request is requests[0] and completion.segments[0].weight_version == 2
    assert completion.tokens == expected(requests[:1], 2)["r0"]
    assert backend.take_stats().generated_tokens == 0


@pytest.mark.slow
def test_new_worker_is_ready_for_the_next_weight_update(start, monkeypatch):
    """Else the writer leaves it out, and it continues with the previous weights."""
    backend = start()
    backend.update_weights(1)
    seen = []
    end_reading = backend.memory.end_reading

    def look_and_end():
        seen.append(backend.replicas[0].ready)
        end_reading()

    monkeypatch.setattr(backend.memory, "end_reading", look_and_end)
    backend.replicas[0].worker.kill()
    backend.submit([request("r")])
    list(backend.completions())
    assert seen == [True]


@pytest.mark.slow
def test_requests_rerun_when_the_worker_dies_and_end_once(start):
    backend = start()
    backend.update_weights(1)
    requests = [request("fatal", 6, first=666), *(request(f"r{i}", 6) for i in range(5))]
    backend.submit(requests)
    completions = list(backend.completions())
    assert sorted(c.request.id for c in completions) == sorted(r.id for r in requests)
    assert {c.request.id: c.tokens for c in completions} == expected(requests)
    assert backend.restarts == 1


@pytest.mark.slow
def test_worker_that_dies_repeatedly_is_an_error(start):
    backend = start()
    backend.update_weights(1)
    backend.submit([request("fatal", 4, first=668)])
    with pytest.raises(WorkerFailed, match="request fatal was under way 4 times when a replica was lost"):
        list(backend.completions())


def test_worker_that_cannot_start_is_an_error():
    started = []
    launch = Launch("tests.worker.slow_backend:make", "{no json")
    with pytest.raises(WorkerFailed, match="ended with code 1 before it was ready"):
        ReplicaPool(launch, [kill_the_first(0, started)], UNLIMITED, list, patience=PATIENT)
    assert len(started) == 1, "another one would fail alike"


def kill_the_first(number: int, started: list):
    """Returns a place whose first workers are killed while they load."""

    def place(launch, weights):
        worker = WorkerProcess(launch, weights)
        if len(started) < number:
            worker.kill()
        started.append(worker)
        return worker

    return place


SLOW = Launch("tests.worker.slow_backend:make", json.dumps({"seconds": 0.0, "die_once": ""}))


def test_worker_killed_before_it_is_ready_is_replaced():
    started, warnings = [], []
    places = [kill_the_first(1, started)]
    backend = ReplicaPool(SLOW, places, UNLIMITED, list, warnings.append, PATIENT)
    backend.submit([request("a")])
    assert {c.request.id: c.tokens for c in backend.completions()} == expected([request("a")])
    assert len(started) == 2 and backend.restarts == 1
    assert "code -9 before it was ready" in warnings[0]
    backend.close()


def test_workers_killed_before_they_are_ready_end_with_an_error_after_the_restarts():
    started = []
    patience = replace(PATIENT, restarts=1)
    with pytest.raises(WorkerFailed, match="ended with code -9 before it was ready"):
        ReplicaPool(SLOW, [kill_the_first(9, started)], UNLIMITED, list, patience=patience)
    assert len(started) == 2


class StandIn:
    """A worker without a process: this end says hello, and may go."""

    id = 1

    def __init__(self) -> None:
        ours, self.other_end = socket.socketpair()
        self.connection = Connection(ours)
        self.ended = threading.Event()
        Connection(self.other_end).send(Message("hello"))

    def kill(self) -> None:
        self.connection.close()

    def wait(self, seconds: float) -> bool:
        return True

    def end(self, seconds: float = 2.0) -> int:
        self.connection.close()
        self.ended.set()
        return -9


@pytest.mark.slow
def test_worker_ends_silently_when_its_client_closes_while_it_loads(capfd):
    weights = SharedWeights()
    settings = json.dumps({"seconds": 0, "die_once": ""})
    worker = WorkerProcess(Launch("tests.worker.slow_backend:make", settings), weights)
    worker.connection.close()
    assert worker.process.wait(60) == 0
    weights.close()
    assert capfd.readouterr().err == ""


def test_worker_that_connects_after_close_is_ended():
    first, late = StandIn(), StandIn()
    coming, closed = threading.Event(), threading.Event()

    def place(launch, weights):
        if not first.ended.is_set():
            return first
        coming.set()
        assert closed.wait(120)
        return late

    backend = ReplicaPool(Launch("", ""), [place], 1, list, patience=replace(PATIENT, close=0.1))
    first.other_end.close()
    assert coming.wait(120)
    backend.close()
    closed.set()
    assert late.ended.wait(120), "no other thread would"


class Silent(StandIn):
    """One that was brought up to date and has not read or said anything since."""

    def __init__(self) -> None:
        super().__init__()
        Connection(self.other_end).send(Message("done", call=1))  # to the greeting


def silent_pool(patience: Patience, *later: StandIn) -> ReplicaPool:
    workers = iter([Silent(), *later])
    places = [lambda launch, weights: next(workers)]
    pool = ReplicaPool(Launch("", ""), places, UNLIMITED, list, patience=patience)
    with pool.changed:
        assert pool.changed.wait_for(lambda: pool.replicas[0].ready, 120)
    return pool


def submit_more_than_a_socket_holds(pool: ReplicaPool) -> None:
    """Returns once a thread of the pool sends it."""
    pool.submit([Request("long", (1,) * 1_000_000, 0, SamplingParams())])
    wait_for(pool.replicas[0].worker.connection._sending.locked)


def wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_close_ends_a_call_that_waits_for_its_answer():
    pool = silent_pool(PATIENT)
    ended = []

    def ask() -> None:
        with pytest.raises(WorkerFailed, match="closed"):
            pool.take_stats()
        ended.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    wait_for(lambda: pool.replicas[0].answers)
    pool.close()
    thread.join(60)
    assert ended


def test_close_does_not_wait_for_a_worker_that_does_not_read():
    before = set(threading.enumerate())
    pool = silent_pool(replace(PATIENT, close=0.2, beat=60.0))
    submit_more_than_a_socket_holds(pool)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.slow
def test_worker_that_hangs_during_a_send_is_replaced():
    """A ping would have to wait for the sender."""
    pool = silent_pool(replace(PATIENT, answer=0.5, beat=0.1), StandIn())
    first = pool.replicas[0].worker
    submit_more_than_a_socket_holds(pool)
    assert first.ended.wait(60)
    assert len(pool.queue) == 1 and not pool.replicas[0].outstanding, "the next one gets it"
    pool.close()


def test_messages_of_another_version_or_kind_are_refused():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(FRAME.pack(MAGIC, 99, 2, 0) + b"{}")
        with pytest.raises(Disconnected, match="protocol version 99"):
            Connection(ours).receive()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\x80\x04pickle?" + b"\0" * 20)
        with pytest.raises(Disconnected, match="no message"):
            Connection(ours).receive()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = [np.arange(6, dtype=np.int64).reshape(2, 3), np.array(1.5), np.zeros(0, dtype=np.uint8)]
        Connection(theirs).send(Message("x", {"a": float("inf")}, sent, call=7))
        got = Connection(ours).receive()
        assert got.call == 7 and got.fields == {"a": float("inf")}
        assert all(a.shape == b.shape and (a == b).all() for a, b in zip(got.arrays, sent, strict=True))


def test_submit_messages_split_many_requests_within_the_size_limit():
    requests = [request(f"train/123456/{i}/0") for i in range(2 * REQUESTS_PER_MESSAGE + 1)]
    messages = submit_messages(requests)
    assert len(messages) == 3 and submit_messages([]) == []
    assert len(json.dumps(messages[0].fields)) < MAX_HEADER_BYTES / 8
    assert [r for message in messages for r in read_requests(message)] == requests


def test_request_traces_survive_the_protocol():
    """Every native rollout has some; statistics with them could not be sent."""
    stats = RolloutStats(generated_tokens=5, requests_left_out=1)
    moments = (("waiting", 0.5, -1), ("decode", 0.75, 3))
    stats.note_request(RequestTrace("a", moments, 4, 2, FinishReason.STOP))
    assert parse(RolloutStats, json.loads(json.dumps(plain(stats)))) == stats


@pytest.mark.slow
def test_client_close_ends_all_its_threads(start):
    """One that does is stopped wherever it is when the interpreter ends."""
    before = set(threading.enumerate())
    backend = start(patience=replace(PATIENT, beat=60.0))
    backend.update_weights(1)
    backend.submit([request("r", 3)])
    assert list(backend.completions())
    assert set(threading.enumerate()) - before
    backend.close()
    assert not set(threading.enumerate()) - before
