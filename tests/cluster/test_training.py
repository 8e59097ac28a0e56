"""A run with replicas is the run of a single process: same tokens, same rewards, same weights."""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from paceline.loop import Trainer, train
from paceline.report.console import Console
from paceline.runs.interruption import Interruption
from paceline.tasks.running_sums import RunningSums
from tests.length_reward import pay_for_length
from tests.loop_helpers import comparable_metrics, make_tiny_policy, tiny_config

SMALL = ("eval.problems=4", "run.steps=4", "checkpoint.every=2", "report.closing_pairs=0")
DEPENDS_ON_BATCHES = ("speculation/", "cluster/", "rollout/decode_steps", "rollout/tail_steps")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def length_reward(monkeypatch):
    monkeypatch.setattr(RunningSums, "score", pay_for_length)


def data_of(run):
    """Returns all metrics that do not depend on which requests ran together."""
    return [
        {k: v for k, v in record.items() if not k.startswith(DEPENDS_ON_BATCHES)}
        for record in comparable_metrics(run)
    ]


def weights_of(run, step=4):
    return load_file(run / "checkpoints" / f"step_{step:06d}" / "policy" / "model.safetensors")


@pytest.fixture(scope="module")
def alone(policy, tmp_path_factory):
    root = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunningSums, "score", pay_for_length)
        train(tiny_config(policy, root, "alone", *SMALL))
    return root / "alone"


@pytest.mark.slow
def test_replicas_train_as_a_single_process_does_even_if_one_is_killed(policy, alone, tmp_path):
    config = tiny_config(policy, tmp_path, "pool", *SMALL, "cluster.replicas=2")
    trainer = Trainer(config, "default", None, None, Console(quiet=True))
    pool = trainer.session.backend
    pids = {replica.worker.id for replica in pool.replicas}
    assert len(pids | {os.getpid()}) == 3
    client = pool.replicas[1]
    submit = client.submit

    def submit_and_kill(*given):
        client.submit = submit
        os.kill(client.worker.id, signal.SIGSTOP)  # so that it cannot finish before it is killed
        submit(*given)
        os.kill(client.worker.id, signal.SIGKILL)

    client.submit = submit_and_kill
    with Interruption() as interruption:
        assert trainer.run(interruption).finished
    run = tmp_path / "pool"
    assert data_of(run) == data_of(alone)
    ours, theirs = weights_of(run), weights_of(alone)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    steps = [record for record in comparable_metrics(run) if record["kind"] == "train"]
    assert [step["cluster/restarts"] for step in steps] == [1] * 4, "of the evaluation before step 1"
    assert all(step["cluster/replicas"] == 2 and step["cluster/retried_requests"] >= 1 for step in steps)
