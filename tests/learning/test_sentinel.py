"""Low-precision rollouts that go wrong: the run falls back, says so, loses nothing, resumes alike."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from paceline import session
from paceline.config import ConfigError, load_config
from paceline.learning.checkpoint import list_checkpoints
from paceline.learning.learner import Learner
from paceline.learning.sentinel import TrainingFailed
from paceline.loop import train
from paceline.policy.huggingface import load_policy, save_policy
from paceline.precision.kv_scales import KVScales
from paceline.report.console import Console
from paceline.rollout.samples import write_groups
from paceline.tasks.running_sums import RunningSums
from paceline.types import Purpose
from tests.length_reward import pay_for_length
from tests.loop_helpers import comparable_metrics, make_tiny_policy, tiny_config, tiny_overrides
from tests.low_precision import BreakingBackend, breaking_session

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "rollout.backend=reference",
    "rollout.speculation.drafters=[]",
    "rollout.speculation.max_running=0",
    "eval.problems=2",
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def length_reward(monkeypatch):
    monkeypatch.setattr(RunningSums, "score", pay_for_length)


@pytest.fixture(scope="module")
def in_base(policy, tmp_path_factory) -> list[dict[str, float]]:
    """The run in base precision, which every run that falls back must equal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunningSums, "score", pay_for_length)
        run = train(tiny_config(policy, tmp_path_factory.mktemp("runs"), "base", *SETTINGS)).summary.run
    return comparable_metrics(run)


def listen() -> tuple[Console, list[str]]:
    console = Console(quiet=True)
    warnings = []
    console.warn = warnings.append
    return console, warnings


def without_the_flag(records: list[dict[str, float]]) -> list[dict[str, float]]:
    """The records without what says that rollouts were in low precision, or have been."""
    flags = ("rollout/fell_back", "eval/base_precision")
    return [{k: v for k, v in record.items() if k not in flags} for record in records]


def fell_back_from(records: list[dict[str, float]]) -> list[int]:
    return [record["step"] for record in records if record.get("rollout/fell_back")]


@pytest.mark.parametrize(
    "harm, breaks_at, falls_at, reason",
    [
        ("nan", 3, 3, "1 of 16 responses have logprobs that are not finite"),
        pytest.param(
            "kl", 2, 2, "mismatch/kl = 0.5 exceeds rollout.sentinel.kl = 0.1", marks=pytest.mark.slow
        ),
        pytest.param("none", 1, 0, "", marks=pytest.mark.slow),
    ],
)
def test_fallback_reruns_the_step_as_base_precision_would_have(
    in_base, policy, tmp_path, monkeypatch, harm, breaks_at, falls_at, reason
):
    monkeypatch.setattr(session, "make_backend", breaking_session(harm, breaks_at))
    console, warnings = listen()
    run = train(tiny_config(policy, tmp_path, "run", *SETTINGS), console=console).summary.run
    records = comparable_metrics(run)
    assert without_the_flag(records) == without_the_flag(in_base)
    assert fell_back_from(records) == ([] if not falls_at else list(range(falls_at, 7)))
    assert [warning for warning in warnings if "SENTINEL" in warning] == warnings
    if falls_at:
        said = (
            f"SENTINEL, step {falls_at}: {reason}. "
            "Rollouts continue in base precision instead of fp8; the step is rerun"
        )
        assert warnings == [said]


@pytest.mark.slow
def test_sentinel_trips_on_a_wrong_scale_of_the_real_cache(tmp_path, monkeypatch):
    """From the first update on, the engine's scales are a tenth of what they should be: large keys clip."""
    monkeypatch.undo()  # the task's own reward
    sound = KVScales.calibrate
    calls = []

    def spoiled(self):
        unfit = sound(self)
        calls.append(1)
        self.scales_L2H.mul_(0.1 if len(calls) > 1 else 1.0)
        return unfit

    monkeypatch.setattr(KVScales, "calibrate", spoiled)
    few = ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "eval.problems=2"]
    few = [*few, "run.steps=3", "rollout.precision=fp8+kv", f"run.root={tmp_path}", "run.name=run"]
    console, warnings = listen()
    run = train(load_config("default", few), console=console).summary.run
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in steps if record["kind"] == "train"]
    assert [record["step"] for record in steps] == [1, 2, 3] and fell_back_from(steps) == [2, 3]
    assert "mismatch/kl" in warnings[0] and "rollout.sentinel.kl" in warnings[0]
    assert (
        steps[0]["mismatch/k3"] > 0
        and abs(steps[0]["mismatch/kl"]) < 0.1
        and max(record["mismatch/kl"] for record in steps[1:]) < 1e-3
    ), "the step was rerun at full precision"


@pytest.mark.slow
def test_sentinel_trips_on_responses_at_the_cap_for_two_steps_in_a_row(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "make_backend", breaking_session("capped", 2))
    console, warnings = listen()
    run = train(
        tiny_config(policy, tmp_path, "run", *SETTINGS, "run.steps=4", "eval.every=0"), console=console
    ).summary.run
    steps = [record for record in comparable_metrics(run) if record["kind"] == "train"]
    assert [step["rollout/truncated"] == 1 for step in steps] == [False, True, False, False], (
        "step 3 was rerun"
    )
    assert fell_back_from(steps) == [3, 4]
    assert (
        len(warnings) == 1
        and "step 3: all responses reached the length limit for 2 steps in a row" in warnings[0]
    )


@pytest.mark.slow
def test_sentinel_reports_a_cap_that_base_precision_reaches_as_well(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "make_backend", breaking_session("none", 1))
    console, warnings = listen()
    short = ("rollout.max_tokens=1", "run.steps=2", "eval.every=0")
    train(tiny_config(policy, tmp_path, "run", *SETTINGS, *short), console=console)
    assert (
        "SENTINEL, step 2" in warnings[0]
        and "precision is not the cause" in warnings[1]
        and len(warnings) == 2
    )
    console, warnings = listen()
    train(
        tiny_config(policy, tmp_path, "unwatched", *SETTINGS, *short, "rollout.sentinel.capped_steps=0"),
        console=console,
    )
    assert not warnings


def test_sentinel_with_a_threshold_of_zero_watches_nothing(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "make_backend", breaking_session("kl", 1))
    console, warnings = listen()
    settings = ("run.steps=2", "eval.every=0", "rollout.sentinel.kl=0")
    run = train(tiny_config(policy, tmp_path, "run", *SETTINGS, *settings), console=console).summary.run
    assert not warnings and not fell_back_from(comparable_metrics(run))
    assert all(
        r["mismatch/kl"] == pytest.approx(0.5, abs=1e-3)
        for r in comparable_metrics(run)
        if r["kind"] == "train"
    )


# -- resuming --------------------------------------------------------------------------------------


def start(*arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.low_precision", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and (not path.exists() or len(path.read_text().splitlines()) < count):
        time.sleep(0.005)


@pytest.mark.slow
def test_fallback_survives_sigkill(in_base, policy, tmp_path):
    """Killed before the checkpoint with the fallback, it is decided again; after it, remembered."""
    run = tmp_path / "killed"
    process = start("kl", "3", "train", *tiny_overrides(policy, tmp_path, "killed"), *SETTINGS)
    outputs = []
    said = [True]
    # An evaluation and steps 1 to 3; then another evaluation, step 4 with its checkpoint, step 5.
    for lines in (4, 7):
        wait_for_lines(run / "metrics.jsonl", lines)
        process.kill()
        outputs.append(process.communicate()[0])
        said.append(not (run / "checkpoints/step_000004").exists())
        process = start("kl", "3", "train", "--resume", str(run))
    outputs.append(process.communicate(timeout=600)[0])
    assert process.returncode == 0, outputs[-1]
    assert ["SENTINEL, step 3" in output for output in outputs] == said and not said[-1]
    records = comparable_metrics(run)
    assert without_the_flag(records) == without_the_flag(in_base) and fell_back_from(records) == [3, 4, 5, 6]
    state = json.loads((run / "checkpoints/step_000006/state.json").read_text())
    assert state["fallback"].startswith("step 3: mismatch/kl")


@pytest.mark.slow
def test_capped_step_count_survives_a_resume(policy, tmp_path, monkeypatch):
    """All responses at the cap in step 2, then a stop: step 3 is the second in a row after resuming, too."""
    monkeypatch.setattr(session, "make_backend", breaking_session("capped", 2))
    settings = (*SETTINGS, "eval.every=0")
    whole = train(tiny_config(policy, tmp_path, "whole", *settings, "run.steps=4")).summary.run
    train(tiny_config(policy, tmp_path, "stopped", *settings, "run.steps=2"))
    stopped = train(
        tiny_config(policy, tmp_path, "stopped", *settings, "run.steps=4"), resume=tmp_path / "stopped"
    ).summary.run
    steps = [[r for r in comparable_metrics(run) if r["kind"] == "train"] for run in (whole, stopped)]
    assert steps[0] == steps[1] and fell_back_from(steps[1]) == [3, 4]


@pytest.mark.slow
def test_resumed_run_falls_back_before_it_rolls_out(policy, tmp_path, monkeypatch):
    """Although nothing is wrong any more: the decision is for the whole run."""
    settings = (*SETTINGS, "eval.every=0")
    monkeypatch.setattr(session, "make_backend", breaking_session("nan", 1))
    train(tiny_config(policy, tmp_path, "run", *settings, "run.steps=2"))
    backends: list[BreakingBackend] = []
    sound = breaking_session("none", 1)
    monkeypatch.setattr(
        session, "make_backend", lambda *arguments: backends.append(sound(*arguments)) or backends[-1]
    )
    console, warnings = listen()
    run = train(
        tiny_config(policy, tmp_path, "run", *settings, "run.steps=3"),
        resume=tmp_path / "run",
        console=console,
    ).summary.run
    assert backends[0].in_base and backends[0].fallbacks == 1 and not warnings
    assert fell_back_from(comparable_metrics(run)) == [1, 2, 3]


# -- updates that are not finite -------------------------------------------------------------------


def fail_updates(monkeypatch, *updates: int) -> list[int]:
    """The n-th gradients the optimiser sees are not finite, whatever precision the samples came in."""
    seen: list[int] = []
    real = Learner._backward

    def backward(self, *arguments):
        sums = real(self, *arguments)
        seen.append(len(seen) + 1)
        if seen[-1] in updates:
            next(self.policy.parameters()).grad.fill_(math.inf)
        return sums

    monkeypatch.setattr(Learner, "_backward", backward)
    return seen


ONE_PASS = ("learning.micro_batch_tokens=4096", "eval.every=0", "eval.problems=1")


@pytest.mark.slow
def test_failed_update_in_base_precision_is_skipped_reported_and_counted(policy, tmp_path, monkeypatch):
    fail_updates(monkeypatch, 2)
    console, warnings = listen()
    run = train(
        tiny_config(policy, tmp_path, "run", *SETTINGS, *ONE_PASS, "run.steps=4"), console=console
    ).summary.run
    steps = [record for record in comparable_metrics(run) if record["kind"] == "train"]
    assert [step["policy/nonfinite_updates"] for step in steps] == [0, 1, 0, 0]
    assert [step["policy/failed_steps"] for step in steps] == [0, 1, 0, 0] and steps[1]["policy/skipped"] == 1
    assert (
        len(warnings) == 1
        and "step 2: a loss or gradient was not finite; the update was skipped" in warnings[0]
    )


def test_failed_updates_in_a_row_stop_the_run_and_name_the_checkpoint(policy, tmp_path, monkeypatch):
    fail_updates(monkeypatch, 3, 4)
    config = tiny_config(policy, tmp_path, "run", *SETTINGS, *ONE_PASS, "run.steps=6")
    with pytest.raises(TrainingFailed) as caught:
        train(config)
    run = tmp_path / "run"
    assert f"`paceline train --resume {run}` continues from {run}/checkpoints/step_000002" in str(
        caught.value
    )
    steps = [record for record in comparable_metrics(run) if record["kind"] == "train"]
    assert [step["step"] for step in steps] == [1, 2, 3, 4] and steps[-1]["policy/failed_steps"] == 2, (
        "both are in the metrics"
    )
    monkeypatch.undo()
    monkeypatch.setattr(RunningSums, "score", pay_for_length)
    assert train(config, resume=run).finished


def test_failed_step_is_never_saved(policy, tmp_path, monkeypatch):
    """Neither when a checkpoint is due nor at the end; the next step that learns is saved out of turn."""
    settings = (*SETTINGS, *ONE_PASS, "checkpoint.every=2", "checkpoint.keep=9")
    with monkeypatch.context() as patch:
        fail_updates(patch, 2, 5)
        run = train(tiny_config(policy, tmp_path, "run", *settings, "run.steps=5")).summary.run
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step_000003", "step_000004"]
    resumed = train(tiny_config(policy, tmp_path, "run", *settings, "run.steps=5"), resume=run)
    assert resumed.finished and comparable_metrics(run)[-2]["policy/failed_steps"] == 0, "step 5 is rerun"


@pytest.mark.slow
def test_blown_update_does_not_push_out_the_last_sound_checkpoint(policy, tmp_path, monkeypatch):
    """Step 3's weights are finite but give no finite logit: its checkpoint is useless, the one before not."""
    spoil_weights(monkeypatch, 3, 1e38, "head.weight")
    with pytest.raises(TrainingFailed) as caught:
        train(
            tiny_config(
                policy, tmp_path, "run", *SETTINGS, *ONE_PASS, "checkpoint.every=1", "checkpoint.keep=2"
            )
        )
    folder = tmp_path / "run/checkpoints"
    assert [path.name for path in list_checkpoints(folder)] == ["step_000002", "step_000003"]
    assert f"continues from {folder}/step_000003; if it fails there again" in str(caught.value)
    assert (
        f"policy.path={folder}/step_000003/policy or policy.path={folder}/step_000002/policy "
        "or what this run began with"
    ) in str(caught.value)


def test_weights_that_are_not_finite_are_never_saved(policy, tmp_path, monkeypatch):
    spoil_weights(monkeypatch, 3, math.nan)
    with pytest.raises(
        TrainingFailed,
        match=r"after step 3 1 parameters are not finite, first layers.0.feed_forward.down.weight"
        r".*continues from .*step_000002",
    ):
        train(
            tiny_config(
                policy, tmp_path, "run", *SETTINGS, *ONE_PASS, "checkpoint.every=1", "checkpoint.keep=1"
            )
        )
    assert [path.name for path in list_checkpoints(tmp_path / "run/checkpoints")] == ["step_000002"]


def test_training_failed_error_mentions_a_missing_checkpoint(policy, tmp_path, monkeypatch):
    fail_updates(monkeypatch, 1, 2)
    with pytest.raises(TrainingFailed, match="2 steps in a row .* there is no checkpoint yet"):
        train(tiny_config(policy, tmp_path, "run", *SETTINGS, *ONE_PASS, "checkpoint.every=5"))


def test_failed_update_in_low_precision_is_rerun_in_base(in_base, policy, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "make_backend", breaking_session("none", 1))
    seen = fail_updates(monkeypatch, 2)
    console, warnings = listen()
    run = train(
        tiny_config(policy, tmp_path, "run", *SETTINGS, "learning.micro_batch_tokens=4096"), console=console
    ).summary.run
    records = comparable_metrics(run)
    assert len(seen) == 7 and fell_back_from(records) == [2, 3, 4, 5, 6]
    assert (
        len(warnings) == 1
        and "SENTINEL, step 2: 1 updates had a loss or gradient that is not finite" in warnings[0]
    )
    ours, theirs = ([r["reward/mean"] for r in part if r["kind"] == "train"] for part in (records, in_base))
    assert ours == theirs and all(r["policy/nonfinite_updates"] == 0 for r in records if r["kind"] == "train")


@pytest.mark.slow
def test_sound_updates_before_a_failed_one_stand(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "make_backend", breaking_session("none", 1))
    fail_updates(monkeypatch, 4)  # the second minibatch of step 2
    console, warnings = listen()
    settings = (*SETTINGS, *ONE_PASS, "run.steps=3", "learning.minibatches=2")
    run = train(tiny_config(policy, tmp_path, "run", *settings), console=console).summary.run
    steps = [record for record in comparable_metrics(run) if record["kind"] == "train"]
    assert fell_back_from(steps) == [2, 3] and [step["policy/skipped"] for step in steps] == [0, 0, 0]
    assert "the updates that were sound stand" in warnings[0]
    state = json.loads((run / "checkpoints/step_000003/state.json").read_text())
    assert state["optimiser_steps"] == 5


def test_fallback_happens_only_while_the_kv_pool_is_awake(policy, tmp_path, monkeypatch):
    """Falling back builds a new pool, which would add to what learning holds and be woken while awake."""
    backends: list[BreakingBackend] = []
    make = breaking_session("none", 1)
    monkeypatch.setattr(
        session, "make_backend", lambda *arguments: backends.append(make(*arguments)) or backends[-1]
    )
    asleep = [False]
    states = []

    real = BreakingBackend.fall_back_to_base_precision
    monkeypatch.setattr(session.Session, "gives_memory", True)
    monkeypatch.setattr(BreakingBackend, "sleep", lambda self: asleep.__setitem__(0, True))
    monkeypatch.setattr(BreakingBackend, "wake", lambda self: asleep.__setitem__(0, False))
    monkeypatch.setattr(
        BreakingBackend, "fall_back_to_base_precision", lambda self: states.append(asleep[0]) or real(self)
    )
    fail_updates(monkeypatch, 4)  # the second minibatch of step 2
    train(tiny_config(policy, tmp_path, "run", *SETTINGS, *ONE_PASS, "run.steps=2", "learning.minibatches=2"))
    assert states == [False]


def test_policy_that_is_not_finite_falls_back_once_and_then_stops(policy, tmp_path, monkeypatch):
    """NaN weights are not the precision's fault: base precision fails as well, twice, and the run ends."""
    make = breaking_session("none", 1)

    def poison(decoder, tokenizer, config, plan=None):
        with torch.no_grad():
            next(decoder.parameters()).fill_(math.nan)
        return make(decoder, tokenizer, config)

    monkeypatch.setattr(session, "make_backend", poison)
    console, warnings = listen()
    with pytest.raises(TrainingFailed, match="2 steps in a row"):
        train(tiny_config(policy, tmp_path, "run", *SETTINGS, *ONE_PASS), console=console)
    assert sum("SENTINEL" in warning for warning in warnings) == 1


# -- weights that are not finite -------------------------------------------------------------------


def spoil_weights(
    monkeypatch, step: int, value: float, name: str = "layers.0.feed_forward.down.weight"
) -> None:
    """The update of this step, whose gradient is sound, leaves weights that are not."""
    calls = []
    real = Learner.update

    def update(self, *arguments):
        metrics = real(self, *arguments)
        calls.append(1)
        if len(calls) == step:
            with torch.no_grad():
                self.policy.get_parameter(name).fill_(value)
        return metrics

    monkeypatch.setattr(Learner, "update", update)


IN_FP8 = (
    "rollout.precision=fp8",
    "rollout.sentinel.kl=0",
    "rollout.sentinel.capped_steps=0",
    "eval.every=0",
    "eval.problems=1",
)


def test_weights_that_fp8_cannot_hold_stop_the_run_and_name_the_checkpoint(policy, tmp_path, monkeypatch):
    spoil_weights(monkeypatch, 3, math.inf)
    with pytest.raises(TrainingFailed) as caught:
        train(tiny_config(policy, tmp_path, "run", *IN_FP8))
    assert (
        "after step 3 the weights of 1 of 8 projections are not finite, "
        "first layers.0.feed_forward.down.weight"
    ) in str(caught.value)
    assert f"continues from {tmp_path}/run/checkpoints/step_000002" in str(caught.value)


@pytest.mark.parametrize("settings", [IN_FP8, SETTINGS])
def test_policy_that_is_not_finite_is_refused(policy, tmp_path, settings):
    poisoned = load_policy(policy, torch.float32)
    with torch.no_grad():
        poisoned.layers[1].attention.qkv.weight[0, 0] = math.nan
    save_policy(poisoned, tmp_path / "poisoned", tokenizer_from=policy)
    with pytest.raises(
        ConfigError,
        match=r"policy.path = .*poisoned': 1 parameters are not finite in .*, "
        r"first layers.1.attention.qkv.weight",
    ):
        train(tiny_config(tmp_path / "poisoned", tmp_path, "run", *settings))
    assert not (tmp_path / "run").exists()


def test_replayed_samples_have_nothing_to_fall_back_to(policy, tmp_path, monkeypatch):
    config = load_config(None, [*tiny_overrides(policy, tmp_path, "unused"), *SETTINGS])
    opened = session.open_session(config)
    groups = opened.sampler.sample(opened.task.train[:4], Purpose.TRAIN, 1, 4, opened.train_sampling())
    for sample in (sample for group in groups for sample in group.samples):
        object.__setattr__(sample.completion, "logprobs", tuple(x + 0.5 for x in sample.completion.logprobs))
    write_groups(tmp_path / "saved/step_000001.jsonl", groups, opened.tokenizer)
    monkeypatch.setattr(session, "make_backend", breaking_session("none", 1))
    console, warnings = listen()
    replayed = tiny_config(policy, tmp_path, "replayed", *SETTINGS, "run.steps=2", "eval.every=0")
    run = train(replayed, replay=tmp_path / "saved", console=console).summary.run
    assert not warnings and not fell_back_from(comparable_metrics(run))
