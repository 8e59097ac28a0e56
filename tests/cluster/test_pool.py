"""Several replicas behind one queue: the tokens of one generator, whatever happens to the processes."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
import torch

from paceline.cluster.capabilities import RemoteSpeculation
from paceline.cluster.merged_stats import merge_stats
from paceline.cluster.pool import ReplicaPool
from paceline.stats import ReplicaStats, RolloutStats
from paceline.types import FinishReason, Request, SamplingParams
from paceline.worker.client import Patience, Restored
from paceline.worker.codec import tensors_of
from paceline.worker.process import Launch, WorkerFailed, WorkerProcess
from paceline.worker.wire import Message
from tests.worker.slow_backend import SlowBackend

# Long enough for a machine that pauses: a worker that is killed for it would count as a restart.
PATIENT = Patience(start=300, answer=60, beat=0.3, close=10, restarts=3)
ENDLESS = 10**9  # tokens


def request(name: str, tokens: int = 5, first: int = 1, **more) -> Request:
    return Request(name, (first, 2), sum(map(ord, name)), SamplingParams(max_tokens=tokens), **more)


def expected(requests, weight: int = 0):
    backend = SlowBackend(0.0, "")
    backend.update_weights(1, [("w", torch.tensor([weight]))])
    backend.submit(requests)
    return {c.request.id: c.tokens for c in backend.completions()}


def make_pool(tmp_path, replicas=2, seconds=0.002, capacity=8, retries=3, places=None) -> ReplicaPool:
    settings = json.dumps({"seconds": seconds, "die_once": str(tmp_path / "died")})
    return ReplicaPool(
        Launch("tests.worker.slow_backend:make", settings),
        places or [WorkerProcess] * replicas,
        capacity,
        lambda: [("w", torch.zeros(2))],
        patience=PATIENT,
        retries=retries,
    )


def pids(pool) -> list[int]:
    return [replica.worker.id for replica in pool.replicas]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    made = make_pool(tmp_path_factory.mktemp("pool"))
    yield made
    processes = [replica.worker.process for replica in made.replicas]
    made.close()
    assert all(process.returncode is not None for process in processes)


def test_replicas_are_processes_and_return_the_tokens_of_one_generator(pool):
    assert len({os.getpid(), *pids(pool)}) == 3
    restarts = pool.restarts  # other tests may have come first
    pool.update_weights(1, [("w", torch.tensor([3.0, 4.0]))])
    requests = [request(f"r{i}", 3 + i % 7) for i in range(40)]
    pool.submit(requests)
    completions = list(pool.completions())
    assert {c.request.id: c.tokens for c in completions} == expected(requests, 7)
    assert len(completions) == len(requests)
    assert all(c.segments[0].weight_version == 1 for c in completions)
    stats = pool.take_stats()
    assert stats.replicas.count == 2 and stats.replicas.restarts == restarts
    assert 0.0 <= stats.replicas.idle_share < 1.0


def test_pool_activity_returns_at_once_after_a_change_between_two_calls(pool):
    """Who watches and was busy when something changed does not sleep over it."""
    wait_until_ready(pool)
    pool.take_stats()  # asks every replica, so that all it had to tell before is known
    seen = pool.activity(0.0, -1).changes
    began = time.monotonic()
    assert pool.activity(0.2, seen).changes == seen and time.monotonic() - began >= 0.2, "nothing changed"
    pool.changed_state()
    began = time.monotonic()
    assert pool.activity(120.0, seen).changes == seen + 1 and time.monotonic() - began < 60.0


def test_pool_shares_work_within_each_replicas_capacity(pool, monkeypatch):
    wait_until_ready(pool)
    pool.update_weights(2)
    most = [0, 0]
    take = pool.queue.take

    def noted(number, count):
        taken = take(number, count)
        most[number] = max(most[number], len(pool.replicas[number].outstanding) + len(taken))
        return taken

    monkeypatch.setattr(pool.queue, "take", noted)
    pool.submit([request(f"s{i}", 40) for i in range(60)])
    assert len(list(pool.completions())) == 60
    assert all(0 < count <= 8 for count in most)


def test_pool_abort_ends_running_and_waiting_requests(pool):
    wait_until_ready(pool)
    pool.update_weights(3)
    requests = [request(f"a{i}", ENDLESS) for i in range(24)]
    pool.submit(requests)
    wait_for(lambda: sum(len(replica.outstanding) for replica in pool.replicas) == 16)
    pool.abort([r.id for r in requests])
    completions = list(pool.completions())
    assert sorted(c.request.id for c in completions) == sorted(r.id for r in requests)
    assert {c.finish_reason for c in completions} == {FinishReason.ABORTED}


def test_pool_continues_in_the_background_while_paused(pool):
    pool.update_weights(4)
    pool.submit([request(f"p{i}", 3) for i in range(20)])
    pool.pause()
    assert list(pool.completions()) == []
    deadline = time.monotonic() + 60
    while len(pool.arrived) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pool.arrived) == 20, "replicas waited for their reader"
    pool.resume()
    assert len(list(pool.completions())) == 20


def submit_to_a_stopped_replica(pool, requests) -> int:
    """Submits, and returns the process of replica 0, which has some of them and cannot finish any."""
    wait_until_ready(pool)
    process = pool.replicas[0].worker.id
    os.kill(process, signal.SIGSTOP)
    pool.submit(requests)
    wait_for(lambda: pool.replicas[0].outstanding)
    return process


def test_killed_replicas_requests_rerun_with_the_same_seeds(pool):
    wait_until_ready(pool)
    pool.update_weights(5, [("w", torch.tensor([1.0, 1.0]))])
    requests = [request(f"k{i}", 60) for i in range(16)]
    before = pool.restarts
    pool.take_stats()
    killed = submit_to_a_stopped_replica(pool, requests)
    os.kill(killed, signal.SIGKILL)
    completions = list(pool.completions())
    assert {c.request.id: c.tokens for c in completions} == expected(requests, 2)
    assert len(completions) == len(requests)
    stats = pool.take_stats().replicas
    assert pool.restarts == stats.restarts == before + 1 and stats.retried_requests >= 1
    wait_until_ready(pool)
    assert killed not in pids(pool)


def wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_until_ready(pool) -> None:
    wait_for(lambda: all(replica.ready for replica in pool.replicas))


@pytest.mark.slow
def test_replacement_replica_has_the_newest_weights(pool):
    """Weights that were handed over while it was being started included."""
    wait_until_ready(pool)
    before = pool.restarts
    os.kill(pool.replicas[1].worker.id, signal.SIGKILL)
    wait_for(lambda: pool.restarts > before)
    pool.update_weights(6, [("w", torch.tensor([4.0, 4.0]))])
    wait_until_ready(pool)
    requests = [request(f"n{i}", 5) for i in range(8)]
    pool.submit(requests)
    completions = list(pool.completions())
    assert {c.request.id: c.tokens for c in completions} == expected(requests, 8)
    assert {s.weight_version for c in completions for s in c.segments} == {6}


@pytest.mark.slow
def test_hung_replica_is_noticed_and_replaced(pool, monkeypatch):
    wait_until_ready(pool)
    pool.update_weights(7)
    before = pool.restarts
    requests = [request(f"h{i}", 30) for i in range(12)]
    hung = submit_to_a_stopped_replica(pool, requests)
    client = pool.replicas[0]
    # Impatient until it is noticed: the next one may take its time.
    monkeypatch.setattr(client, "warn", lambda text: setattr(client, "patience", PATIENT))
    client.patience = replace(PATIENT, answer=3)
    completions = list(pool.completions())
    assert {c.request.id: c.tokens for c in completions} == expected(requests)
    wait_until_ready(pool)
    assert pool.take_stats().replicas.restarts == before + 1
    assert not is_running(hung)


@pytest.mark.slow
def test_request_that_crashes_replicas_is_retried_up_to_the_limit_and_named(tmp_path):
    pool = make_pool(tmp_path, retries=1)
    try:
        pool.update_weights(1)
        pool.submit([request("good", 3), request("fatal", 4, first=668)])
        with pytest.raises(WorkerFailed, match="request fatal was under way 2 times"):
            list(pool.completions())
        with pytest.raises(WorkerFailed, match="fatal"):
            pool.submit([request("later")])
    finally:
        pool.close()


@pytest.mark.slow
def test_pool_continues_with_the_remaining_replicas(tmp_path):
    started = []
    warnings = []

    def fragile(launch, weights):
        started.append(launch)
        if len(started) > 1:
            raise WorkerFailed("there is no such machine any more")
        return WorkerProcess(launch, weights)

    pool = make_pool(tmp_path, places=[fragile, WorkerProcess])
    pool.warn = warnings.append
    try:
        pool.update_weights(1)
        requests = [request(f"g{i}", 40) for i in range(10)]
        os.kill(submit_to_a_stopped_replica(pool, requests), signal.SIGKILL)
        completions = list(pool.completions())
        assert {c.request.id: c.tokens for c in completions} == expected(requests)
        wait_for(lambda: warnings)
        assert pool.take_stats().replicas.count == 1
        assert "replica 0 is given up" in warnings[0] and "1 of 2 are left" in warnings[0]
    finally:
        pool.close()


@pytest.mark.slow
def test_requests_end_once_under_kills_aborts_updates_and_pauses(tmp_path):
    pool = make_pool(tmp_path, seconds=0.003, retries=50)
    rng = random.Random(5)
    stopped = threading.Event()

    def kill_now_and_then():
        try:
            for kills in range(1, 4):
                time.sleep(0.5)
                while not (ready := [replica for replica in pool.replicas if replica.ready]):
                    time.sleep(0.01)
                os.kill(rng.choice(ready).worker.id, signal.SIGKILL)
                while pool.restarts < kills:
                    time.sleep(0.01)
            wait_until_ready(pool)
        finally:
            stopped.set()

    try:
        pool.update_weights(0)
        threading.Thread(target=kill_now_and_then, daemon=True).start()
        ended: list[str] = []
        submitted: list[str] = []
        version = 0
        while not stopped.is_set() or len(ended) < len(submitted):
            if not stopped.is_set():
                new = [request(f"r{len(submitted) + i}", rng.randint(1, 30)) for i in range(5)]
                submitted += [r.id for r in new]
                pool.submit(new)
                if rng.random() < 0.5:
                    pool.abort([rng.choice(submitted)])
                version += 1
                pool.update_weights(version, [("w", torch.tensor([float(version), 0.0]))])
            pool.resume()
            for completion in pool.completions():
                ended.append(completion.request.id)
                assert all(0 <= s.weight_version <= version for s in completion.segments)
                if rng.random() < 0.2 and not stopped.is_set():
                    pool.pause()
        assert sorted(ended) == sorted(submitted) and pool.restarts >= 3
    finally:
        pool.close()


@dataclass
class Replica:
    """A worker's client that answers at once, if it is ready."""

    number: int
    ready: bool = True
    failure: WorkerFailed | None = None
    asked: list[Message] = field(default_factory=list)

    def ask(self, message: Message) -> Message:
        self.asked.append(message)
        return Message("done")


def test_published_head_reaches_every_replica_and_is_kept_for_replacements():
    pool = ReplicaPool.__new__(ReplicaPool)
    pool.replicas = [Replica(number, ready=number != 1) for number in range(3)]
    pool.failure, pool.closed, pool.restored = None, False, Restored()
    trained = torch.tensor([2.0])
    with ThreadPoolExecutor(3) as pool._callers:
        RemoteSpeculation(pool).publish_drafter(5, {"w": trained})
    trained.add_(1)  # training continues
    asked = [[message.kind for message in replica.asked] for replica in pool.replicas]
    assert asked == [["publish_drafter"], [], ["publish_drafter"]]
    kept = pool.restored.published
    assert kept.fields["version"] == 5 and tensors_of(kept)["w"].tolist() == [2.0]


@pytest.mark.parametrize(("versions", "merged"), [((7, 5), 5), ((None, 5), 5), ((None, None), None)])
def test_merged_stats_report_the_oldest_drafter_version(versions, merged):
    """One that was being replaced may have missed the newest."""
    parts = [(number, RolloutStats(drafter_version=version)) for number, version in enumerate(versions)]
    assert merge_stats(parts, ReplicaStats(2, 0, 0, 0.0, 0.0)).drafter_version == merged
