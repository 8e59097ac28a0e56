"""The contract: what a generator can do beyond generating is declared, and kept apart in a checkpoint."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.backend import Backend
from paceline.config import ConfigError, load_config
from paceline.drafting.history import HistoryDrafter
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.reference import ReferenceBackend
from paceline.learning.checkpoint import CALIBRATION_FILE, DRAFTERS_FILE, load_calibration, load_drafters
from paceline.loop import train
from paceline.models.source import BUILTIN_POLICY
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.huggingface import load_policy
from paceline.session import open_session
from paceline.types import Precision
from tests.loop_helpers import comparable_metrics, make_tiny_policy, tiny_config


@pytest.fixture
def decoder():
    return load_policy(BUILTIN_POLICY, torch.float32)


def test_backend_without_a_capability_implements_none_of_it(decoder):
    for backend in (ReferenceBackend(decoder), Engine(decoder, EngineSettings(max_running=2, kv_tokens=512))):
        assert isinstance(backend, Backend)
        assert backend.speculation is None and backend.low_precision is None
    assert not hasattr(ReferenceBackend(decoder), "drafter_state")
    assert not hasattr(ReferenceBackend(decoder), "fall_back_to_base_precision")


def test_backend_with_missing_abstract_methods_cannot_be_instantiated():
    class Half(Backend):
        def submit(self, requests):
            pass

    with pytest.raises(TypeError, match="abstract"):
        Half()


def test_engine_declares_the_capabilities_it_has(decoder):
    settings = EngineSettings(max_running=2, kv_tokens=512, precision=Precision.FP8_KV)
    engine = Engine(
        decoder, settings, drafters=[HistoryDrafter()], pacer=FixedPacer(Strategy("history", 2), 2)
    )
    assert engine.speculation is engine and engine.speculation.keeps_tokens
    assert engine.low_precision is engine and engine.precision is Precision.FP8_KV
    engine.fall_back_to_base_precision()
    assert engine.low_precision is None and engine.precision is Precision.BASE


def test_published_head_is_the_one_that_drafts():
    config = load_config(None, ["run.device=cpu", "rollout.speculation.drafters=[eagle]"])
    session = open_session(config)
    speculation = session.backend.speculation
    before = {name: tensor.clone() for name, tensor in speculation.trainable_head.named_parameters()}
    changed = {name: tensor + 1 for name, tensor in before.items()}
    speculation.publish_drafter(2, changed)
    assert session.backend.take_stats().drafter_version == 2
    assert all(torch.equal(p, changed[name]) for name, p in speculation.trainable_head.named_parameters())
    session.close()


@pytest.mark.slow
def test_checkpoint_separates_scales_from_drafter_state_and_early_ones_load(tmp_path):
    policy = make_tiny_policy(tmp_path / "policy")
    low = ("rollout.precision=fp8+kv", "rollout.sentinel.capped_steps=0", "rollout.sentinel.kl=0")
    whole = train(tiny_config(policy, tmp_path, "whole", *low)).summary.run
    train(tiny_config(policy, tmp_path, "first", *low, "run.steps=2"))
    checkpoint = tmp_path / "first/checkpoints/step_000002"
    drafters = load_file(checkpoint / DRAFTERS_FILE)
    scales = load_file(checkpoint / CALIBRATION_FILE)
    assert drafters and not any(name.startswith("precision.") for name in drafters)
    assert scales and all(name.startswith("precision.") for name in scales)

    early = tmp_path / "early"
    early.mkdir()
    save_file({**drafters, **scales}, early / DRAFTERS_FILE)
    assert load_drafters(early).keys() == drafters.keys()
    assert all(torch.equal(tensor, scales[name]) for name, tensor in load_calibration(early).items())
    assert load_calibration(early).keys() == scales.keys()

    train(load_config(str(tmp_path / "first/config.yaml"), ["run.steps=6"]), resume=tmp_path / "first")
    assert trained(tmp_path / "first") == trained(whole)


def trained(run) -> list[dict[str, float]]:
    """Returns the records of steps; a run that ended early was evaluated once more than the whole one."""
    return [record for record in comparable_metrics(run) if record["kind"] == "train"]


def test_precision_bf16_of_old_recipes_and_runs_means_base(tmp_path):
    old, new = (load_config(None, [f"rollout.precision={name}"]) for name in ("bf16", "base"))
    assert old == new and old.rollout.precision is Precision.BASE
    with pytest.raises(ConfigError, match="'fp4': must be one of base, fp8, fp8[+]kv"):
        load_config(None, ["rollout.precision=fp4"])
    policy = make_tiny_policy(tmp_path / "policy")
    train(tiny_config(policy, tmp_path, "run", "run.steps=2"))
    recipe = tmp_path / "run/config.yaml"
    before, rollout = recipe.read_text().split("\nrollout:")
    old_rollout = rollout.replace("\n  precision: base", "\n  precision: bf16", 1)
    recipe.write_text(f"{before}\nrollout:{old_rollout}")
    assert "\n  precision: bf16" in recipe.read_text()
    config = load_config(str(recipe), ["run.steps=3"])
    assert train(config, resume=tmp_path / "run").finished
