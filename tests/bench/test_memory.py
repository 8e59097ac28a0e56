"""The memory bench, as far as a CPU can run it; tests/plan/test_plan_gpu.py runs the rest."""

import pytest
import torch
from typer.testing import CliRunner

from paceline.bench.memory import longest_groups
from paceline.cli.main import app
from paceline.config import ConfigError, load_config
from paceline.engine.engine import Engine, EngineSettings
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder

SHAPE = DecoderConfig("llama", 24, 32, 48, 1, 2, 1, 16, 64, eos_token_ids=(0,))


def test_every_sequence_is_as_long_as_the_recipe_allows():
    overrides = ["task.max_prompt_tokens=7", "rollout.max_tokens=9", "eval.max_tokens=12"]
    config = load_config(None, [*overrides, "rollout.prompts_per_step=3", "rollout.samples_per_prompt=2"])
    engine = Engine(Decoder(SHAPE).initialise(0), EngineSettings(max_running=4, kv_tokens=512))
    groups = longest_groups(engine, config, SHAPE, step=1)
    assert len(groups) == 3
    for group in groups:
        assert len({sample.completion.request.prompt for sample in group.samples}) == 1
        for sample in group.samples:
            assert len(sample.completion.request.prompt) == 7 and len(sample.completion.tokens) == 9


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_it_says_what_does_without():
    with pytest.raises(ConfigError, match="bench memory needs a GPU.*paceline plan --gpu NAME"):
        CliRunner().invoke(app, ["bench", "memory", "policy.path=qwen3-8b"], catch_exceptions=False)
