"""Benches of a recipe refuse what they would ignore: the figures would be of another setting."""

from functools import partial

import pytest
from typer.testing import CliRunner

from paceline.bench.recipe import acceptance_config, speculation_config
from paceline.bench.setup import recipe_engine, recipe_policy, recipe_requests
from paceline.bench.speculation import bench_recipe
from paceline.cli.main import app
from paceline.config import ConfigError
from paceline.types import Precision


@pytest.mark.parametrize("command", ["speculation", "acceptance"])
@pytest.mark.parametrize(
    "override, message",
    [
        (
            "rollout.max_running=4",
            "rollout.max_running = '4': `bench [a-z]+` would ignore it; .*leave it out",
        ),
        ("policy.lora.rank=8", "policy.lora.rank = '8': `bench [a-z]+` would ignore it"),
        ("rollout={precision: fp8}", "rollout = '{precision: fp8}': `bench [a-z]+` would ignore it"),
        ("learning.lr=1", "learning.lr = '1': `bench [a-z]+` would ignore it"),
    ],
)
def test_what_would_be_ignored_is_refused(command, override, message):
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["bench", command, override], catch_exceptions=False)


def test_acceptance_refuses_a_recipe_file_in_fp8_which_can_be_overridden(tmp_path):
    recipe = tmp_path / "fp8.yaml"
    recipe.write_text("rollout: {precision: fp8}\n")
    said = r"rollout.precision = 'fp8': .*own type only; .*bench rollout --precision"
    with pytest.raises(ConfigError, match=said):
        acceptance_config(str(recipe), [])
    config = acceptance_config(str(recipe), ["rollout.precision=bf16", "rollout.max_tokens=24"])
    assert config.rollout.is_default("precision") and config.rollout.max_tokens == 24


@pytest.mark.parametrize("read", [acceptance_config, partial(speculation_config, drafter="history")])
def test_a_recipe_file_with_adapters_is_refused_and_can_be_overridden(tmp_path, read):
    recipe = tmp_path / "adapters.yaml"
    recipe.write_text("policy: {lora: {rank: 8, path: adapters}}\n")
    with pytest.raises(ConfigError, match="policy.lora.path = 'adapters': .* leave these adapters out"):
        read(str(recipe), [])
    assert not read(str(recipe), ["policy.lora.path="]).policy.lora.path


@pytest.mark.slow
def test_speculation_is_measured_in_the_recipes_precision_and_shape():
    overrides = ["rollout.precision=fp8", "rollout.max_tokens=24", "rollout.speculation.shape=tree"]
    config = speculation_config("default", overrides, "history")
    policy, prompts = recipe_policy(config)
    requests = recipe_requests(config, prompts, 4)
    engine = recipe_engine(config, policy, requests, 2, "history")
    assert engine.precision is Precision.FP8 and engine.settings.trees
    points = list(bench_recipe(config, policy, prompts, "history", [2], [4], ["shared-noise"], 1, 1))
    assert [p.strategy for p in points] == ["plain", "plain, drafter on", "history:tree4"]
    assert points[-1].identical == 1.0
    with pytest.raises(ConfigError, match="--verify rejection: .*shape = 'tree'"):
        next(bench_recipe(config, policy, prompts, "history", [2], [4], ["rejection"], 1, 1))


def test_acceptance_takes_no_drafter_and_no_mode_of_the_engine():
    for override in ("rollout.speculation.eagle_path=auto", "rollout.deterministic=true"):
        with pytest.raises(ConfigError, match="`bench acceptance` would ignore it"):
            CliRunner().invoke(app, ["bench", "acceptance", "default", override], catch_exceptions=False)
