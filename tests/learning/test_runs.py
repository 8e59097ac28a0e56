"""Runs with DAPO, rollout correction and LoRA report what they do and resume as if never stopped."""

import json
from pathlib import Path

import pytest
import torch

from paceline.cli.export import export_policy
from paceline.config import load_config
from paceline.loop import train
from paceline.policy.huggingface import exported_tensors, load_policy
from paceline.report.console import Console
from paceline.tasks.running_sums import RunningSums
from paceline.types import Score
from tests.loop_helpers import comparable_metrics, make_tiny_policy, tiny_config

RUNS = {
    "dapo": ("learning.algorithm=dapo", "learning.dynamic_sampling_rounds=4"),
    "correction": (
        "learning.correction.preset=seq-mis",
        "learning.correction.normalise=true",
        "learning.minibatches=2",
        "learning.lr=1e-2",
    ),
    "lora": (
        "policy.lora.rank=4",
        "learning.kl_coef=0.05",
        "learning.algorithm=reinforce++",
        "learning.lr=1e-2",
    ),
}


def pay_for_an_early_digit(self, problem, response: str, truncated: bool) -> Score:
    """An untrained policy earns it now and then, so some groups score unevenly and others alike."""
    return Score(float(response[:1].isdigit()), correct=response[:1].isdigit())


@pytest.fixture(autouse=True)
def reward(monkeypatch):
    monkeypatch.setattr(RunningSums, "score", pay_for_an_early_digit)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


def steps_of(run: Path) -> list[dict[str, float]]:
    return [record for record in comparable_metrics(run) if record["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["dapo", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("correction", "lora"))]
)
def test_resumed_run_equals_an_uninterrupted_one(kind, policy, tmp_path):
    settings = (*RUNS[kind], "rollout.samples_per_prompt=3", "eval.every=0", "eval.problems=1")
    whole = train(tiny_config(policy, tmp_path, "whole", *settings, "run.steps=4")).summary.run
    stopped = train(tiny_config(policy, tmp_path, "stopped", *settings, "run.steps=2")).summary.run
    train(load_config(str(stopped / "config.yaml"), ["run.steps=4"]), resume=stopped)
    assert steps_of(stopped) == steps_of(whole)
    states = [
        json.loads((run / "checkpoints/step_000004/state.json").read_text()) for run in (whole, stopped)
    ]
    assert states[0]["task_position"] == states[1]["task_position"] >= 16


@pytest.mark.slow
def test_dapo_reports_what_it_dropped_and_punished(policy, tmp_path):
    warnings: list[str] = []
    console = Console(quiet=True)
    console.warn = warnings.append
    config = tiny_config(
        policy,
        tmp_path,
        "run",
        *RUNS["dapo"],
        "rollout.samples_per_prompt=3",
        "eval.problems=1",
        "run.steps=3",
    )
    run = train(config, console=console).summary.run
    steps = steps_of(run)
    assert sum(step["rollout/dropped_groups"] for step in steps) > 0
    for step in steps:
        assert -1 <= step["reward/overlong"] <= 0
        sampled = 4 * step["rollout/sampling_rounds"]
        kept = step["rollout/samples"] / 3
        assert sampled == kept + step["rollout/dropped_groups"] + step["rollout/surplus_groups"]
        assert kept == 4 or any(f"step {step['step']}:" in warning for warning in warnings)
    assert any(step["reward/overlong"] < 0 for step in steps), "some responses reach the end of 24 tokens"
    drawn = 4 * sum(step["rollout/sampling_rounds"] for step in steps)
    assert json.loads((run / "checkpoints/step_000003/state.json").read_text())["task_position"] == drawn


def test_lora_run_exports_the_model_that_it_sampled_from(policy, tmp_path):
    run = train(
        tiny_config(policy, tmp_path, "run", *RUNS["lora"], "eval.problems=1", "run.steps=2")
    ).summary.run
    assert all(step["policy/largest_logprob_delta"] < 1e-4 for step in steps_of(run)), (
        "engine and learner have one policy"
    )
    export_policy(run, tmp_path / "out", "float32")
    exported, base = (
        dict(exported_tensors(load_policy(folder, torch.float32))) for folder in (tmp_path / "out", policy)
    )
    saved = dict(exported_tensors(load_policy(run / "checkpoints/step_000002/policy", torch.float32)))
    assert all(torch.equal(tensor, saved[name]) for name, tensor in exported.items())
    changed = {name for name, tensor in exported.items() if not torch.equal(tensor, base[name])}
    assert changed == {name for name in exported if name.endswith("_proj.weight")}
    assert (tmp_path / "out/adapter/adapter_model.safetensors").is_file()
