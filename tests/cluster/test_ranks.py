"""Learner ranks and replicas: step 1 is the single process's, and a lost rank costs time but no data."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from paceline.cluster import placing
from paceline.loop import Trainer, train
from paceline.report.console import Console
from paceline.rollout.samples import read_groups
from paceline.runs.interruption import Interruption
from paceline.tasks.running_sums import RunningSums
from tests.cluster.test_training import SMALL, alone, data_of, policy, weights_of  # noqa: F401
from tests.length_reward import pay_for_length
from tests.loop_helpers import tiny_config

pytestmark = pytest.mark.slow
RANKS = ("cluster.replicas=2", "cluster.learners=2", "report.samples_per_step=4")
# Sums over ranks are added in another order; AdamW's first steps make much of small gradients.
WEIGHT_NOISE = 2e-5


@pytest.fixture(autouse=True)
def length_reward(monkeypatch):
    monkeypatch.setattr(RunningSums, "score", pay_for_length)


def tokens_of(run, step):
    groups = read_groups(run / "samples" / f"step_{step:06d}.jsonl")
    return [[s.completion.tokens for s in g.samples] for g in groups], [g.rewards for g in groups]


def test_two_ranks_and_two_replicas_make_the_single_processs_step(policy, tmp_path):  # noqa: F811
    one_step = (*SMALL, "run.steps=1", "report.samples_per_step=4")
    train(tiny_config(policy, tmp_path, "alone", *one_step))
    # Colocated: replicas sleep while the ranks learn, and wake for the next rollout.
    config = tiny_config(policy, tmp_path, "ranks", *one_step, *RANKS, "cluster.placement=colocated")
    trainer = Trainer(config, "default", None, None, Console(quiet=True))
    processes = [
        *trainer.session.ranks.processes,
        *(r.worker.id for r in trainer.session.backend.replicas),
    ]
    assert len({os.getpid(), *processes}) == 5
    with Interruption() as interruption:
        assert trainer.run(interruption).finished
    assert tokens_of(tmp_path / "ranks", 1) == tokens_of(tmp_path / "alone", 1)
    ours, theirs = weights_of(tmp_path / "ranks", 1), weights_of(tmp_path / "alone", 1)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=WEIGHT_NOISE)
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_lost_rank_restarts_all_ranks_from_the_last_checkpoint(policy, tmp_path, monkeypatch, capfd):  # noqa: F811
    train(tiny_config(policy, tmp_path, "whole", *SMALL, *RANKS))
    killed = []
    ranks = []
    start = placing.LearnerRanks
    monkeypatch.setattr(placing, "LearnerRanks", lambda *given: ranks.append(start(*given)) or ranks[-1])

    class Watching(Console):
        """Kills the rank that serves the others' store, before step 3."""

        def step(self, step, metrics):
            super().step(step, metrics)
            if step == 2 and not killed:
                killed.append(ranks[-1].processes[0])
                os.kill(killed[0], signal.SIGKILL)

    console = Watching(quiet=True)
    warnings = []
    console.warn = warnings.append
    result = train(tiny_config(policy, tmp_path, "killed", *SMALL, *RANKS), console=console)
    assert result.finished and killed
    assert any("learner rank" in text and "last checkpoint" in text for text in warnings)
    assert "frame #" not in capfd.readouterr().err, "a stack of C++ hides what happened"
    assert data_of(tmp_path / "killed") == data_of(tmp_path / "whole")
    assert children_with("paceline.worker") == []


def children_with(word: str) -> list[int]:
    """Returns this process's children whose command has this word."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread, or a child, that has ended meanwhile
            for pid in (thread / "children").read_text().split():
                with suppress(OSError):
                    found += [int(pid)] if word in Path(f"/proc/{pid}/cmdline").read_text() else []
    return found
