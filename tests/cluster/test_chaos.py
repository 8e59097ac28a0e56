"""Replicas and ranks killed at random points over many steps: the same data, and no process left behind."""

import os
import random
import signal
import threading
import time

import pytest

from paceline.loop import train
from paceline.report.console import Console
from paceline.tasks.running_sums import RunningSums
from tests.cluster.test_ranks import RANKS, children_with
from tests.cluster.test_training import data_of, policy  # noqa: F401
from tests.length_reward import pay_for_length
from tests.loop_helpers import tiny_config

pytestmark = pytest.mark.slow
STEPS = 10
RUN = (*RANKS, f"run.steps={STEPS}", "eval.every=5", "eval.problems=4", "report.closing_pairs=0")
PATIENT = ("cluster.restarts=20", "cluster.retries=20", "checkpoint.every=1")


class Chaos(Console):
    """Kills a process some time after a step, of one kind or the other."""

    def __init__(self, seed: int) -> None:
        super().__init__(quiet=True)
        self.rng = random.Random(seed)
        self.killed: list[str] = []
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def step(self, step, metrics) -> None:
        super().step(step, metrics)
        kind = {2: "hosted_replica", 4: "hosted_rank", 5: "hosted_replica", 8: "hosted_replica"}.get(step)
        if kind is not None and self.killed.count(kind) < 3:
            threading.Thread(target=self._kill, args=(kind, self.rng.uniform(0.0, 0.4)), daemon=True).start()

    def _kill(self, kind: str, seconds: float) -> None:
        time.sleep(seconds)
        found = children_with(kind)
        if found:
            os.kill(self.rng.choice(found), signal.SIGKILL)
            self.killed.append(kind)


@pytest.mark.parametrize("seed", [1])
def test_run_with_killed_processes_ends_with_the_same_data(policy, tmp_path, monkeypatch, seed):  # noqa: F811
    monkeypatch.setattr(RunningSums, "score", pay_for_length)
    assert train(tiny_config(policy, tmp_path, "calm", *RUN)).finished
    console = Chaos(seed)
    assert train(tiny_config(policy, tmp_path, "chaos", *RUN, *PATIENT), console=console).finished
    assert {"hosted_replica", "hosted_rank"} <= set(console.killed), console.warnings
    assert data_of(tmp_path / "chaos") == data_of(tmp_path / "calm")
    assert children_with("paceline.worker") == []
