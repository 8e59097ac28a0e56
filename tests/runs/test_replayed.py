"""Runs that learn from saved samples: their folder records it, and they resume with nothing else."""

import shutil
from pathlib import Path

import pytest

from paceline.report.run_directory import RunDirectory
from tests.loop_helpers import comparable_metrics, tiny_overrides
from tests.runs.conftest import SMALL, signal_self_in


@pytest.fixture(scope="module")
def saved(policy, tmp_path_factory) -> Path:
    """Four steps' samples, so that six steps begin them again."""
    from tests.forked import ForkedCommand

    folder = tmp_path_factory.mktemp("saved") / "a b"
    overrides = tiny_overrides(policy, folder, "unused")
    command = ForkedCommand(["rollout", *overrides, *SMALL, "--steps", "4", "--save", str(folder)])
    assert command.wait() == 0, command.text()
    return folder


@pytest.fixture(scope="module")
def replayed(policy, saved, tmp_path_factory) -> Path:
    """The whole run."""
    from tests.forked import ForkedCommand

    root = tmp_path_factory.mktemp("runs")
    overrides = [*tiny_overrides(policy, root, "whole"), *SMALL]
    command = ForkedCommand(["train", *overrides, "--replay", str(saved)])
    assert command.wait() == 0, command.text()
    return root / "whole"


@pytest.mark.slow
def test_interrupted_replay_resumes_with_its_samples(train, start, saved, replayed, tmp_path):
    stopping = signal_self_in(RunDirectory, "append_metrics", at_call=4)  # step 3 after an evaluation
    command = train("run", "--replay", str(saved), prepare=stopping)
    assert command.wait() == 75, command.text()
    run = tmp_path / "run"
    assert f"continue with: paceline train --resume {run} --replay '{saved}'\n" in command.text()
    before = (run / "metrics.jsonl").read_bytes()
    alone = start("train", "--resume", str(run))
    assert alone.wait() == 2, alone.text()
    said = f"error: {run} was begun with --replay; continue with: paceline train --resume {run} --replay"
    assert f"{said} '{saved}'\n" in alone.text()
    assert (run / "metrics.jsonl").read_bytes() == before
    again = start("train", "--resume", str(run), "--replay", str(saved))
    assert again.wait() == 0, again.text()
    assert comparable_metrics(run) == comparable_metrics(replayed)


def test_finished_replay_does_not_continue_live(start, replayed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(replayed, run)
    command = start("train", "--resume", str(run), "run.steps=8")
    assert command.wait() == 2 and "was begun with --replay" in command.text(), command.text()
    assert RunDirectory(run).config().run.steps == 6


def lose_the_disk() -> None:
    def append(self, record):
        raise OSError(28, "No space left on device")

    RunDirectory.append_metrics = append


def test_replay_without_a_checkpoint_does_not_continue_live(train, start, saved, tmp_path):
    command = train("run", "--replay", str(saved), prepare=lose_the_disk)
    assert command.wait() == 1, command.text()
    run = tmp_path / "run"
    assert command.text().endswith(f"with: paceline train --resume {run} --replay '{saved}'\n")
    alone = start("train", "--resume", str(run))
    assert alone.wait() == 2 and "was begun with --replay" in alone.text()


@pytest.mark.slow
def test_scheduled_run_without_a_checkpoint_does_not_continue_live(train, start, saved, tmp_path):
    partial = ["rollout.mode=partial", "rollout.max_lag=1"]
    first = train("first", *partial)
    assert first.wait() == 0, first.text()
    schedule = tmp_path / "first" / "schedule.jsonl"
    command = train("run", *partial, "--schedule", str(schedule), prepare=lose_the_disk)
    assert command.wait() == 1, command.text()
    run = tmp_path / "run"
    assert command.text().endswith(f"with: paceline train --resume {run} --schedule {schedule}\n")
    for other in ([], ["--replay", str(saved)]):
        refused = start("train", "--resume", str(run), *other)
        assert refused.wait() == 2 and "was begun with --schedule" in refused.text(), refused.text()
    again = start("train", "--resume", str(run), "--schedule", str(schedule))
    assert again.wait() == 0, again.text()


def test_live_run_does_not_continue_with_saved_samples(start, whole, saved, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    command = start("train", "--resume", str(run), "run.steps=8", "--replay", str(saved))
    assert command.wait() == 2, command.text()
    assert f"error: --replay {saved}: {run} was not begun with saved samples" in command.text()
    assert "leave it out, or start another run" in command.text()
