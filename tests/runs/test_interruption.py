"""Signals: the first saves the step, whenever it comes; the next ends at once; exit codes tell which."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.learning import checkpoint
from paceline.report.run_directory import RunDirectory
from paceline.rollout import evaluation
from paceline.runs import interruption as module
from paceline.runs.interruption import EXIT_INTERRUPTED, Interrupted, Interruption
from tests.loop_helpers import comparable_metrics
from tests.runs.conftest import signal_self_in

ROOT = Path(__file__).parents[2]


def saved_steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGHUP, signal.SIGINT))],
)
def test_signal_saves_the_step_and_the_run_resumes(number, whole, train, start, tmp_path):
    command = train("run", prepare=signal_self_in(RunDirectory, "append_metrics", number, at_call=2))
    assert command.wait() == EXIT_INTERRUPTED, command.text()
    assert f"continue with: paceline train --resume {tmp_path}/run\n" in command.text()
    run = tmp_path / "run"
    assert saved_steps(run)[-1] == max(m["step"] for m in comparable_metrics(run) if m["kind"] == "train")
    assert (run / "run.lock").read_text() == "", "the lock was given back"
    again = start("train", "--resume", str(run))
    assert again.wait() == 0, again.text()
    assert comparable_metrics(run) == comparable_metrics(whole)


@pytest.mark.parametrize(
    "where",
    [
        pytest.param((checkpoint, "_save_tensors", 1), id="saving"),
        pytest.param((checkpoint, "sync", 3), id="syncing", marks=pytest.mark.slow),
        pytest.param((checkpoint, "_remove", 1), id="removing", marks=pytest.mark.slow),
        pytest.param((evaluation, "summarise", 2), id="after evaluating", marks=pytest.mark.slow),
        pytest.param((evaluation, "SamplingParams", 2), id="before evaluating", marks=pytest.mark.slow),
    ],
)
def test_signal_at_a_bad_moment_changes_no_result(where, whole, train, start, tmp_path):
    module, name, at_call = where
    command = train("run", "checkpoint.keep=1", prepare=signal_self_in(module, name, at_call=at_call))
    assert command.wait() == EXIT_INTERRUPTED, command.text()
    again = start("train", "--resume", str(tmp_path / "run"))
    assert again.wait() == 0, again.text()
    assert comparable_metrics(tmp_path / "run") == comparable_metrics(whole)
    assert not list((tmp_path / "run/checkpoints").glob(".*"))


@pytest.mark.slow
def test_interrupted_evaluation_ends_at_once_and_is_made_up_for(whole, train, start, tmp_path):
    """Step 1's evaluation is interrupted after the first response; the resumed run begins with it."""
    from paceline.rollout.sampler import GroupSampler
    from paceline.types import Purpose

    def prepare() -> None:
        real = GroupSampler._add_response
        seen = []

        def add(self, underway, completion):
            if completion.request.purpose is Purpose.EVAL:
                seen.append(completion)
                assert len(seen) <= 5, "the evaluation went on"
                if len(seen) == 5:  # step 0 has four
                    os.kill(os.getpid(), signal.SIGTERM)
            return real(self, underway, completion)

        GroupSampler._add_response = add

    command = train("run", "rollout.max_running=2", "eval.every=1", "run.steps=2", prepare=prepare)
    assert command.wait() == EXIT_INTERRUPTED, command.text()
    run = tmp_path / "run"
    assert saved_steps(run) == [1]
    assert [m["step"] for m in comparable_metrics(run) if m["kind"] == "eval"] == [0]
    again = start("train", "--resume", str(run))
    assert again.wait() == 0, again.text()
    evaluations = [m for m in comparable_metrics(run) if m["kind"] == "eval"]
    assert [m["step"] for m in evaluations] == [0, 1, 2]
    assert evaluations[0] == next(m for m in comparable_metrics(whole) if m["kind"] == "eval")


def test_interrupted_run_does_not_report_its_start_as_its_end(train, tmp_path):
    command = train("run", "eval.every=0", prepare=signal_self_in(RunDirectory, "append_metrics", at_call=3))
    assert command.wait() == EXIT_INTERRUPTED
    assert "not evaluated yet" in command.text()


@pytest.mark.slow
def test_second_signal_ends_the_run_at_once(train, start, whole, tmp_path):
    def prepare() -> None:
        module.REPEAT_SECONDS = 0.0
        real = checkpoint._save_tensors

        def save(*arguments):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            real(*arguments)

        checkpoint._save_tensors = save

    command = train("run", prepare=prepare)
    assert command.wait() == 128 + signal.SIGTERM, command.text()
    assert "stopped at once" in command.text() and "Traceback" not in command.text()
    again = start("train", "--resume", str(tmp_path / "run"))
    assert again.wait() == 0, again.text()
    assert comparable_metrics(tmp_path / "run") == comparable_metrics(whole)


def test_signal_forwarded_twice_counts_once(monkeypatch):
    monkeypatch.setattr(module, "REPEAT_SECONDS", 60.0)
    with Interruption() as interruption, interruption.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert interruption.requested is signal.SIGTERM


def test_first_signal_outside_the_loop_ends_the_run(monkeypatch):
    monkeypatch.setattr(module, "REPEAT_SECONDS", 0.0)
    with Interruption() as interruption:
        with pytest.raises(Interrupted) as first:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        assert first.value.exit_code == EXIT_INTERRUPTED and interruption
        with pytest.raises(Interrupted) as second:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        assert second.value.exit_code == 128 + signal.SIGTERM


def test_ignored_signals_stay_ignored_and_handlers_come_back():
    before = {number: signal.getsignal(number) for number in module.SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interruption
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])
    assert {number: signal.getsignal(number) for number in module.SIGNALS} == before


def test_interruption_in_another_thread_installs_no_handler():
    before = {number: signal.getsignal(number) for number in module.SIGNALS}

    def use() -> None:
        with Interruption() as interruption:
            assert not interruption

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert {number: signal.getsignal(number) for number in module.SIGNALS} == before


@pytest.mark.slow
def test_sigterm_during_the_import_of_torch_ends_without_a_traceback(policy, tmp_path):
    """A process of its own: everything from its first line on."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "paceline", "train", f"run.root={tmp_path}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stderr:
        if "| torch._C" in line or line.rstrip().endswith("torch.version"):
            process.send_signal(signal.SIGTERM)
            break
    _, errors = process.communicate(timeout=600)
    assert process.returncode == EXIT_INTERRUPTED
    assert "SIGTERM: stopped before the first step" in errors and "Traceback" not in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_closed_terminal_does_not_prevent_saving_the_step(train, start, whole, tmp_path):
    """What is printed fails from the second step on, as it does where the terminal is gone."""

    def prepare() -> None:
        signal_self_in(RunDirectory, "append_metrics", signal.SIGHUP, at_call=2)()
        reading, writing = os.pipe()
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.close(reading)

    command = train("run", prepare=prepare)
    assert command.wait() == EXIT_INTERRUPTED
    again = start("train", "--resume", str(tmp_path / "run"))
    assert again.wait() == 0, again.text()
    assert comparable_metrics(tmp_path / "run") == comparable_metrics(whole)
