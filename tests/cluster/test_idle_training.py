"""Replicas without work train while others finish, stop for work at once, and publish one mean."""

import json
import time

import pytest
import torch

from paceline.cluster.idle_training import weighted_mean
from paceline.cluster.pool import ReplicaPool
from paceline.types import Request, SamplingParams
from paceline.worker.process import Launch, WorkerProcess
from tests.cluster.test_pool import QUICK, wait_until_ready


def request(name: str, tokens: int) -> Request:
    return Request(name, (1, 2), 7, SamplingParams(max_tokens=tokens))


def test_a_mean_counts_by_tokens_and_keeps_types():
    trained = [
        ({"w": torch.tensor([0.0, 2.0], dtype=torch.bfloat16)}, 1.0),
        ({"w": torch.tensor([4.0, 6.0], dtype=torch.bfloat16)}, 3.0),
    ]
    mean = weighted_mean(trained)["w"]
    assert mean.tolist() == [3.0, 5.0] and mean.dtype == torch.bfloat16


@pytest.mark.slow
def test_idle_replicas_train_stop_for_work_and_publish_once(tmp_path):
    notes = tmp_path / "published"
    settings = json.dumps({"seconds": 0.005, "notes": str(notes)})
    pool = ReplicaPool(
        Launch("tests.cluster.training_backend:make", settings),
        [WorkerProcess] * 2,
        8,
        lambda: [("w", torch.tensor([0.0]))],
        patience=QUICK,
    )
    try:
        pool.update_weights(1)
        for step in (1, 2):
            pool.submit([request(f"long{step}", 300), request(f"short{step}", 2)])
            first = next(iter(pool.completions()))
            assert first.request.id == f"short{step}"
            time.sleep(0.5)  # the replica that is free trains
            free = next(replica for replica in pool.replicas if not replica.outstanding)
            began = time.monotonic()
            pool.submit([request(f"late{step}", 1)])
            late = next(iter(pool.completions()))
            seconds = time.monotonic() - began
            assert late.request.id == f"late{step}" and seconds < 0.5, "work waited for training"
            assert free.client.restarts == 0
            assert [c.request.id for c in pool.completions()] == [f"long{step}"]
            deadline = time.monotonic() + 30
            while not notes.exists() or len(notes.read_text().splitlines()) < 2 * step:
                assert time.monotonic() < deadline, "what was learned was not published"
                time.sleep(0.02)
        wait_until_ready(pool)
        published = [json.loads(line) for line in notes.read_text().splitlines()]
        # Every replica is told once per step, and training goes on from what was published.
        assert [entry["head"] for entry in published] == [[1.0, 1.0]] * 2 + [[2.0, 2.0]] * 2
    finally:
        pool.close()
