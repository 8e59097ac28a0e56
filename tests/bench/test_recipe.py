"""Benches of a recipe refuse what they would ignore: the figures would be of another setting."""

import pytest
from typer.testing import CliRunner

from paceline.bench.recipe import speculation_config
from paceline.cli.main import app
from paceline.config import ConfigError


@pytest.mark.parametrize("command", ["speculation", "acceptance"])
@pytest.mark.parametrize(
    "override, message",
    [
        ("rollout.precision=fp8", r"rollout.precision = 'fp8': .*own type only; .*bench rollout --precision"),
        (
            "rollout.max_running=4",
            "rollout.max_running = '4': `bench [a-z]+` would ignore it; .*leave it out",
        ),
        ("policy.lora.rank=8", "policy.lora.rank = '8': `bench [a-z]+` would ignore it"),
        ("policy.lora.path=adapters", "policy.lora.path = 'adapters': .* leave these adapters out"),
        ("rollout={precision: fp8}", "rollout = '{precision: fp8}': `bench [a-z]+` would ignore it"),
        ("learning.lr=1", "learning.lr = '1': `bench [a-z]+` would ignore it"),
    ],
)
def test_what_would_be_ignored_is_refused(command, override, message):
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["bench", command, override], catch_exceptions=False)


def test_a_recipe_file_in_fp8_is_refused_and_can_be_overridden(tmp_path):
    recipe = tmp_path / "fp8.yaml"
    recipe.write_text("rollout: {precision: fp8}\n")
    with pytest.raises(ConfigError, match="rollout.precision = 'fp8'"):
        speculation_config(str(recipe), [], "history")
    config = speculation_config(str(recipe), ["rollout.precision=bf16", "rollout.max_tokens=24"], "history")
    assert config.rollout.is_default("precision") and config.rollout.max_tokens == 24


def test_acceptance_takes_no_drafter_and_no_mode_of_the_engine():
    for override in ("rollout.speculation.eagle_path=auto", "rollout.deterministic=true"):
        with pytest.raises(ConfigError, match="`bench acceptance` would ignore it"):
            CliRunner().invoke(app, ["bench", "acceptance", "default", override], catch_exceptions=False)
