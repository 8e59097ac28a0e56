"""Runs with groups under way that are killed at any moment: nothing is lost, nothing counts twice."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.loop import train
from paceline.rollout.samples import read_groups
from paceline.tasks.running_sums import RunningSums
from tests.length_reward import pay_for_length
from tests.loop_helpers import make_tiny_policy, tiny_config, tiny_overrides
from tests.rollout.test_modes import STAGGERED, trained
from tests.test_loop import finish, start, wait_for_lines

pytestmark = pytest.mark.slow

SMALL = ("eval.every=0", "eval.problems=1", "report.samples_per_step=4", "checkpoint.every=1")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


def killed_and_resumed(policy, tmp_path, *extra: str) -> Path:
    rng = random.Random(1)
    run = tmp_path / "killed"
    process = start("train", *tiny_overrides(policy, tmp_path, "killed"), *SMALL, *extra)
    for lines in (2, 4):
        wait_for_lines(run / "metrics.jsonl", lines, process)
        time.sleep(rng.random() * 0.3)
        process.kill()
        process.wait()
        process = start("train", "--resume", str(run))
    process.wait()
    finish("train", "--resume", str(run))
    return run


def names_learned_from(run: Path) -> list[str]:
    groups = [group for path in sorted((run / "samples").iterdir()) for group in read_groups(path)]
    return [sample.completion.request.id for group in groups for sample in group.samples]


def test_killed_partial_run_resumes_to_the_uninterrupted_one(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(RunningSums, "score", pay_for_length)
    whole = train(tiny_config(policy, tmp_path, "whole", *SMALL, *STAGGERED)).summary.run
    killed = killed_and_resumed(policy, tmp_path, *STAGGERED)
    assert trained(killed) == trained(whole)
    assert names_learned_from(killed) == names_learned_from(whole)


@pytest.fixture
def workers(tmp_path, monkeypatch) -> Callable[[], set[int]]:
    """Finds the workers of runs that this test has started; other tests have theirs at the same time."""
    monkeypatch.setenv("TEST_WORKERS_OF", str(tmp_path))
    mark = f"TEST_WORKERS_OF={tmp_path}".encode()

    def find() -> set[int]:
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                is_worker = b"paceline.worker" in (folder / "cmdline").read_bytes()
                if is_worker and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(int(folder.name))
            except OSError:
                continue
        return found

    return find


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")
def test_killed_async_run_learns_from_every_group_once_and_leaves_no_worker(policy, tmp_path, workers):
    mode = ("rollout.mode=async", "rollout.max_lag=2", "rollout.max_running=6")
    run = killed_and_resumed(policy, tmp_path, *mode)
    names = names_learned_from(run)
    assert len(names) == len(set(names)) == 6 * 16
    records = trained(run)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert all(record["rollout/lag_max"] <= 2 for record in records)
    positions = [
        group["position"]
        for line in (run / "schedule.jsonl").read_text().splitlines()
        for group in json.loads(line)["groups"]
    ]
    assert len(positions) == len(set(positions)) == 24 and max(positions) < 24 + 12, "no problem was skipped"
    deadline = time.monotonic() + 120
    while workers() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not workers()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")
def test_killed_worker_is_replaced_without_loss(policy, tmp_path, workers):
    mode = ("rollout.mode=async", "rollout.max_lag=1", "rollout.max_running=6")
    process = start("train", *tiny_overrides(policy, tmp_path, "run"), *SMALL, *mode, hold=tmp_path / "go on")
    wait_for_lines(tmp_path / "run/metrics.jsonl", 2, process)
    found = workers()
    assert found
    for worker in found:
        os.kill(worker, signal.SIGKILL)
    (tmp_path / "go on").touch()
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert "another one takes over" in output
    names = names_learned_from(tmp_path / "run")
    assert len(names) == len(set(names)) == 6 * 16
