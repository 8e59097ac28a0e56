"""What a session refuses to open, and in which words."""

import re

import pytest
import torch
from typer.testing import CliRunner

from paceline import session
from paceline.cli.main import app
from paceline.config import ConfigError, changed_keys, load_config
from paceline.device import prepare_device
from paceline.loop import Trainer
from paceline.plan.suggestions import changed
from paceline.policy.tokenizer import character_tokenizer, save_tokenizer
from paceline.report.console import Console
from paceline.runs.interruption import Interruption
from paceline.session import open_session
from paceline.tasks.running_sums import ALPHABET
from tests.loop_helpers import make_tiny_policy, tiny_config


def test_tokenizer_with_tokens_beyond_the_vocabulary_is_refused(tmp_path):
    policy = make_tiny_policy(tmp_path / "policy")
    save_tokenizer(character_tokenizer(ALPHABET + "\u00e9"), policy)
    size = len(ALPHABET) + 1
    with pytest.raises(
        ConfigError,
        match=rf"policy.path = '{policy}': .* up to id {size}, "
        rf"and the policy's vocabulary ends at {size - 1}",
    ):
        open_session(tiny_config(policy, tmp_path, "never"))


@pytest.mark.parametrize(
    "capability, overrides, outcome",
    [
        ((9, 0), ["rollout.precision=fp8+kv"], "cuda"),
        ((8, 9), [], "cuda"),
        ((7, 5), [], "cpu"),
        (
            (7, 5),
            ["run.device=cuda"],
            "run.device = 'cuda': a GPU (compute capability 7.5) does not compute in bf16; "
            "use run.device=cpu",
        ),
        (
            (8, 9),
            ["rollout.precision=fp8"],
            "rollout.precision = 'fp8' needs Hopper or newer, "
            "this is a GPU (compute capability 8.9); use base",
        ),
        (None, ["run.device=cuda"], "run.device = 'cuda': torch sees no GPU here; use run.device=cpu"),
    ],
)
def test_old_gpu_is_unused_by_default_and_refused_if_asked_for(capability, overrides, outcome, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    config = load_config("default", overrides)
    if outcome in ("cuda", "cpu"):
        assert prepare_device(config).type == outcome
    else:
        with pytest.raises(ConfigError, match=re.escape(outcome)):
            prepare_device(config)


def test_bench_refuses_an_old_gpu_by_its_own_option(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    with pytest.raises(
        ConfigError,
        match=r"--precision = 'fp8' needs Hopper or newer, "
        r"this is a GPU \(compute capability 8.9\); use base",
    ):
        CliRunner().invoke(app, ["bench", "rollout", "--precision", "fp8"], catch_exceptions=False)


def test_run_records_and_checkpoints_the_recipe_that_runs(tmp_path, monkeypatch):
    """A recipe settled for the memory there is replaces the one that was asked for, everywhere."""
    config = tiny_config(make_tiny_policy(tmp_path / "policy"), tmp_path, "settled", "run.steps=1")
    settled = changed(config, (("learning.micro_batch_tokens", 999),))
    monkeypatch.setattr(session, "plan_gpu", lambda *given: (settled, None))
    trainer = Trainer(config, "default", None, None, Console(quiet=True))
    trainer.run(Interruption())
    run = trainer.directory
    (checkpoint,) = run.checkpoints_path.glob("step_*")
    stored = [run.config(), load_config(str(checkpoint / "config.yaml"))]
    for kept in (trainer.config, trainer.session.config, *stored):
        assert not changed_keys(settled, kept)
