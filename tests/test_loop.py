"""Whole runs: the same seed gives the same run, and nothing that happens to the process changes that."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.config import ConfigError, load_config
from paceline.learning.sentinel import TrainingFailed
from paceline.loop import train
from paceline.policy.huggingface import load_policy
from paceline.runs.interruption import EXIT_INTERRUPTED
from paceline.tasks.running_sums import RunningSums
from tests.length_reward import pay_for_length
from tests.loop_helpers import comparable_metrics, make_tiny_policy, tiny_config, tiny_overrides

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def uninterrupted(policy, tmp_path_factory):
    """The run that every interrupted one must equal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunningSums, "score", pay_for_length)
        result = train(tiny_config(policy, tmp_path_factory.mktemp("runs"), "whole"))
    assert result.finished
    return result.summary.run


@pytest.fixture(autouse=True)
def length_reward(monkeypatch):
    monkeypatch.setattr(RunningSums, "score", pay_for_length)


def start(*arguments: str, hold: Path | None = None) -> subprocess.Popen:
    """Starts the command; with `hold`, a run waits in the middle until there is that file."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if hold is not None:
        environment["TEST_HOLD"] = str(hold)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.length_reward", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # The suite itself may run in the background of a script, where Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def finish(*arguments: str) -> str:
    process = start(*arguments)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def wait_for_lines(path: Path, count: int, process: subprocess.Popen) -> None:
    """Waits until a run has written so many lines, as long as it is running."""
    deadline = time.monotonic() + 600
    while not path.exists() or len(path.read_text().splitlines()) < count:
        if process.poll() is not None or time.monotonic() > deadline:
            return
        time.sleep(0.005)


def test_run_learns_at_every_step(uninterrupted):
    trained = [m for m in comparable_metrics(uninterrupted) if m["kind"] == "train"]
    assert [m["step"] for m in trained] == [1, 2, 3, 4, 5, 6]
    assert all(m["policy/skipped"] == 0 and m["policy/gradient_norm"] > 0 for m in trained)
    assert all(m["policy/largest_logprob_delta"] < 1e-4 for m in trained), (
        "rollout and learner compute the same logprobs"
    )
    assert (uninterrupted / "checkpoints/best/config.json").is_file()


def test_run_with_the_same_seed_has_the_same_metrics(uninterrupted, policy, tmp_path):
    again = train(tiny_config(policy, tmp_path, "again")).summary.run
    assert comparable_metrics(again) == comparable_metrics(uninterrupted)
    other = train(tiny_config(policy, tmp_path, "other", "run.seed=1", "run.steps=1")).summary.run
    first = [
        next(m for m in comparable_metrics(run) if m["kind"] == "train") for run in (uninterrupted, other)
    ]
    assert first[0]["step"] == first[1]["step"] == 1 and first[0] != first[1]


@pytest.mark.slow
@pytest.mark.ci
def test_run_killed_at_random_moments_resumes_to_the_same_metrics(uninterrupted, policy, tmp_path):
    """Killed once early, before any checkpoint, and then again and again until a resumed run gets through."""
    rng = random.Random(0)
    run = tmp_path / "killed"
    process = start("train", *tiny_overrides(policy, tmp_path, "killed"))
    for lines in (1, 3, 5, 8):
        wait_for_lines(run / "metrics.jsonl", lines, process)
        time.sleep(rng.random() * 0.2)
        process.kill()
        process.wait()
        if lines == 8:
            break
        process = start("train", "--resume", str(run))
    finish("train", "--resume", str(run))
    assert comparable_metrics(run) == comparable_metrics(uninterrupted)


def test_ctrl_c_saves_the_step_and_prints_how_to_continue(uninterrupted, policy, tmp_path):
    process = start("train", *tiny_overrides(policy, tmp_path, "stopped"), hold=tmp_path / "go on")
    wait_for_lines(tmp_path / "stopped/metrics.jsonl", 2, process)
    process.send_signal(signal.SIGINT)
    (tmp_path / "go on").touch()
    output, _ = process.communicate(timeout=600)
    assert process.returncode == EXIT_INTERRUPTED
    assert f"continue with: paceline train --resume {tmp_path}/stopped\n" in output, "in one line, to copy"
    saved = max(int(p.name.split("_")[1]) for p in (tmp_path / "stopped/checkpoints").glob("step_*"))
    assert saved == max(m["step"] for m in comparable_metrics(tmp_path / "stopped"))
    resumed = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "stopped")])
    assert resumed.exit_code == 0, resumed.output
    assert comparable_metrics(tmp_path / "stopped") == comparable_metrics(uninterrupted)


@pytest.mark.slow
def test_resume_from_a_corrupt_newest_checkpoint_uses_an_earlier_one(uninterrupted, tmp_path):
    run = tmp_path / "copy"
    shutil.copytree(uninterrupted, run)
    (run / "checkpoints/step_000006/policy/model.safetensors").write_bytes(b"damaged")
    output = finish("train", "--resume", str(run), "run.threads=1")
    assert "step_000006 is damaged" in output.replace("\n", "") and "resuming" in output
    assert comparable_metrics(run) == comparable_metrics(uninterrupted)
    assert (run / "checkpoints/step_000006.corrupt").is_dir()


def test_resume_lists_what_may_change(uninterrupted, policy, tmp_path):
    config = load_config(str(uninterrupted / "config.yaml"), ["learning.lr=0.5", "run.steps=8"])
    with pytest.raises(ConfigError, match=r"learning.lr: 0.001 -> 0.5.*Allowed to change: run.steps"):
        train(config, resume=uninterrupted)
    run = tmp_path / "longer"
    shutil.copytree(uninterrupted, run)
    train(load_config(str(run / "config.yaml"), ["run.steps=7"]), resume=run)
    assert max(m["step"] for m in comparable_metrics(run)) == 7
    with pytest.raises(ConfigError, match="is not a run directory"):
        train(config, resume=tmp_path)
    with pytest.raises(ConfigError, match="exists. Continue it with --resume"):
        train(tiny_config(policy, tmp_path, "longer"))


@pytest.mark.slow
def test_resume_refuses_an_empty_recipe(uninterrupted, tmp_path):
    run = tmp_path / "emptied"
    shutil.copytree(uninterrupted, run)
    (run / "config.yaml").write_text("")
    process = start("train", "--resume", str(run))
    output, _ = process.communicate(timeout=600)
    assert (
        process.returncode == 2 and "config.yaml is empty" in output and not (run / "config.yaml").read_text()
    )


@pytest.mark.slow
def test_replay_learns_the_same_from_saved_rollouts(uninterrupted, policy, tmp_path):
    """On-policy step 1 from saved samples equals step 1 of the live run."""
    finish("rollout", *tiny_overrides(policy, tmp_path, "unused"), "--save", str(tmp_path / "saved"))
    finish(
        "train", *tiny_overrides(policy, tmp_path, "replayed", steps=1), "--replay", str(tmp_path / "saved")
    )
    live = next(m for m in comparable_metrics(uninterrupted) if m["kind"] == "train")
    replayed = next(m for m in comparable_metrics(tmp_path / "replayed") if m["kind"] == "train")
    decoding = {"rollout/decode_steps", "rollout/tail_steps"}
    assert replayed == {k: v for k, v in live.items() if k not in decoding}


def test_samples_and_checkpoint_can_be_read(uninterrupted):
    record = json.loads((uninterrupted / "samples/step_000006.jsonl").read_text().splitlines()[0])
    assert record["prompt"].endswith("=") and len(record["samples"]) == 4 and "text" in record["samples"][0]
    load_policy(uninterrupted / "checkpoints/step_000006/policy", dtype=__import__("torch").float32)


@pytest.mark.slow
def test_full_disk_ends_with_a_resumable_run(uninterrupted, policy, tmp_path, monkeypatch):
    from paceline.learning import checkpoint

    real = checkpoint.save_tensors
    calls = []

    def fills_up(tensors, path, **kwargs):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(tensors, path, **kwargs)

    monkeypatch.setattr(checkpoint, "save_tensors", fills_up)
    with pytest.raises(TrainingFailed, match="No space left.*continue from the beginning.*--resume"):
        train(tiny_config(policy, tmp_path, "full"))
    monkeypatch.setattr(checkpoint, "save_tensors", real)
    train(tiny_config(policy, tmp_path, "full"), resume=tmp_path / "full")
    assert comparable_metrics(tmp_path / "full") == comparable_metrics(uninterrupted)
