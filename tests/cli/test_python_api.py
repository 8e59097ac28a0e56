"""`paceline.train` and `paceline.load` from Python: what they go by, and arguments that they refuse."""

import pytest
import torch

import paceline
from paceline import api
from paceline.config import ConfigError, dump_config
from tests.loop_helpers import tiny_config


@pytest.fixture
def recipes_run(monkeypatch):
    """The recipes that `paceline.train` would have run, instead of running them."""
    run = []
    monkeypatch.setattr(api, "run_training", lambda config, **_: run.append(config))
    return run


def test_resumed_run_uses_its_own_recipe(policy, tmp_path, recipes_run):
    """It was the default one, which `--resume` refuses for every key that differs."""
    config = tiny_config(policy, tmp_path, "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(dump_config(config))
    paceline.train(resume=tmp_path / "run")
    paceline.train(resume=str(tmp_path / "run"))
    paceline.train()
    longer = tiny_config(policy, tmp_path, "run", "run.steps=9")
    paceline.train(longer, resume=tmp_path / "run")
    assert recipes_run == [config, config, paceline.load_config("default"), longer]
    with pytest.raises(ConfigError, match="nowhere is not a run directory"):
        paceline.train(resume=tmp_path / "nowhere")


@pytest.mark.parametrize(
    "config, named", [({"run": {"steps": 1}}, "config is a dict"), ("default", "config = 'default'")]
)
def test_train_refuses_a_recipe_of_another_type(config, named, recipes_run):
    with pytest.raises(TypeError, match=rf"{named}: must be a Config, such as paceline.load_config\("):
        paceline.train(config)
    assert not recipes_run


def test_load_refuses_a_dtype_that_no_policy_has(policy):
    with pytest.raises(ConfigError, match="policy.dtype = 'float8': must be one of auto, float32, bfloat16"):
        paceline.load(policy, dtype="float8")


@pytest.mark.parametrize(
    "device, message",
    [
        ("nosuch", "device = 'nosuch': must be auto, cpu, cuda"),
        ("meta", "device = 'meta': must be auto, cpu, cuda"),
        ("cuda", "device = 'cuda': torch sees no GPU here; use device='auto' or 'cpu'"),
        ("cuda:1", "device = 'cuda:1': torch sees no GPU here"),
    ],
)
def test_load_refuses_a_device_that_is_not_there(device, message, policy, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        paceline.load(policy, device=device)


def test_load_refuses_a_second_gpu_where_there_is_one(policy, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="device = 'cuda:1': torch sees 1 GPU here"):
        paceline.load(policy, device="cuda:1")


def test_generate_takes_a_list_of_prompts_and_a_count_of_samples(policy):
    loaded = paceline.load(policy, device="cpu")
    with pytest.raises(TypeError, match=r"prompts = 'a9b8=': must be a list of texts; write \['a9b8='\]"):
        loaded.generate("a9b8=")
    with pytest.raises(TypeError, match="prompts: 5 is a int; must be a list of texts"):
        loaded.complete([5])
    for samples in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"samples = {samples}: must be a whole number of at least 1"):
            loaded.generate(["a9b8="], samples=samples)
