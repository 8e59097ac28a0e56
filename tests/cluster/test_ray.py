"""Replicas that Ray places: real processes, the single process's data, and none left behind."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray")

import ray

from paceline.cluster.ray_cluster import ray_cluster
from paceline.config import ClusterConfig, ConfigError
from paceline.loop import Trainer, train
from paceline.report.console import Console
from paceline.runs.interruption import Interruption
from paceline.tasks.running_sums import RunningSums
from tests.cluster.test_pool import is_running
from tests.cluster.test_ranks import RANKS, WEIGHT_NOISE, tokens_of
from tests.cluster.test_training import SMALL, alone, data_of, policy, weights_of  # noqa: F401
from tests.length_reward import pay_for_length
from tests.loop_helpers import tiny_config

pytestmark = pytest.mark.slow


def processes_of(session: str) -> list[int]:
    """Returns the processes of a Ray session that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            zombie = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if session.encode() in command and not zombie:
            found.append(int(folder.name))
    return found


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster("", ClusterConfig(replicas=2, learners=2)):
        session = ray._private.worker.global_worker.node.session_name
        yield
    deadline = time.monotonic() + 120
    while (left := processes_of(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == [], "processes of the Ray cluster outlived it"


@pytest.fixture(autouse=True)
def length_reward(monkeypatch):
    monkeypatch.setattr(RunningSums, "score", pay_for_length)


def test_replicas_under_ray_train_as_a_single_process_does(cluster, policy, alone, tmp_path):  # noqa: F811
    config = tiny_config(policy, tmp_path, "ray", *SMALL, "cluster.replicas=2", "cluster.runtime=ray")
    trainer = Trainer(config, "default", None, None, Console(quiet=True))
    pool = trainer.session.backend
    pids = [replica.worker.id for replica in pool.replicas]
    assert len({os.getpid(), *pids}) == 3
    titles = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
    assert "replica 0" in titles[0] and "replica 1" in titles[1]
    os.kill(pids[0], signal.SIGKILL)
    with Interruption() as interruption:
        assert trainer.run(interruption).finished
    assert data_of(tmp_path / "ray") == data_of(alone)
    ours, theirs = weights_of(tmp_path / "ray"), weights_of(alone)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ended = {*pids, *(replica.worker.id for replica in pool.replicas)}
    deadline = time.monotonic() + 120
    while (left := [pid for pid in ended if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_ray_run_refuses_more_replicas_than_the_cluster_has_cpus_for(cluster, policy, tmp_path):  # noqa: F811
    config = tiny_config(policy, tmp_path, "much", *SMALL, "cluster.replicas=50", "cluster.runtime=ray")
    with pytest.raises(ConfigError, match="cluster.replicas = 50 .* need 50 CPUs, the Ray cluster has 5"):
        Trainer(config, "default", None, None, Console(quiet=True))


@pytest.mark.ci
def test_ranks_and_replicas_under_ray_make_the_single_processs_step(cluster, policy, tmp_path):  # noqa: F811
    one_step = (*SMALL, "run.steps=1", "report.samples_per_step=4")
    train(tiny_config(policy, tmp_path, "alone", *one_step))
    overrides = (*one_step, *RANKS, "cluster.runtime=ray", "cluster.transport=broadcast")
    trainer = Trainer(
        tiny_config(policy, tmp_path, "ray", *overrides), "default", None, None, Console(quiet=True)
    )
    replicas = [replica.worker.id for replica in trainer.session.backend.replicas]
    processes = {os.getpid(), *trainer.session.ranks.processes, *replicas}
    assert len(processes) == 5
    with Interruption() as interruption:
        assert trainer.run(interruption).finished
    assert tokens_of(tmp_path / "ray", 1) == tokens_of(tmp_path / "alone", 1)
    ours, theirs = weights_of(tmp_path / "ray", 1), weights_of(tmp_path / "alone", 1)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=WEIGHT_NOISE)
    deadline = time.monotonic() + 120
    while (left := [p for p in processes - {os.getpid()} if is_running(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
