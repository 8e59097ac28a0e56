"""Arguments of `paceline bench` that cannot be measured: errors name option, value and what is allowed."""

import pytest
from typer.testing import CliRunner

from paceline.bench.rollout import measure_rollouts
from paceline.bench.setup import bench_requests, refuse_beyond_positions
from paceline.cli.main import app
from paceline.config import ConfigError
from paceline.engine.engine import Engine, EngineSettings
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder

SHAPE = DecoderConfig("llama", 40, 32, 64, 1, 2, 1, 16, 256, eos_token_ids=(0,))


def invoke(*arguments: str) -> int:
    return CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False).exit_code


@pytest.mark.parametrize(
    "command, option, value, allowed",
    [
        ("rollout", "--repeats", "-1", "at least 0"),
        ("rollout", "--requests", "0", "at least 1"),
        ("rollout", "--max-running", "0", "from 1 to 65536"),
        ("rollout", "--kv-tokens", "-1", "at least 0"),
        ("learn", "--prompt", "0", "at least 1"),
    ],
)
def test_bench_refuses_numbers_out_of_range(command, option, value, allowed):
    with pytest.raises(ValueError, match=f"^{option} {value}: must be {allowed}$"):
        invoke(command, option, value)


def test_bench_refuses_more_tokens_than_the_policy_has_positions():
    for command in ("rollout", "learn"):
        with pytest.raises(
            ValueError, match="--lengths: 9000 new tokens after --prompt 8 need 9008 positions"
        ):
            invoke(command, "--lengths", "fixed:9000", "--prompt", "8")
    refuse_beyond_positions(SHAPE, 56, 200, "--new 199")
    with pytest.raises(ValueError, match="--new 200"):
        refuse_beyond_positions(SHAPE, 56, 201, "--new 200")


def test_bench_rollout_names_a_pool_that_holds_no_request():
    engine = Engine(Decoder(SHAPE).initialise(0), EngineSettings(2, 16))
    with pytest.raises(ValueError, match="request 0 was refused: .* KV tokens; the pool holds"):
        measure_rollouts(engine, bench_requests([60, 60], 40, SHAPE.vocab_size), 0)


def test_bench_rollout_may_run_once():
    sizes = ["--requests", "2", "--prompt", "3", "--lengths", "fixed:3", "--repeats", "0"]
    assert invoke("rollout", *sizes) == 0


@pytest.mark.parametrize(
    "override, message",
    [
        (
            "rollout.mode=async",
            "rollout.mode = 'async': a rollout's benchmark would ignore it; .*leave it out",
        ),
        ("policy.lora.rank=8", "policy.lora.rank = '8': a rollout's benchmark would ignore it"),
        ("rollout={precision: fp8}", "rollout = '{precision: fp8}': a rollout's benchmark would ignore it"),
    ],
)
def test_bench_rollout_refuses_recipe_keys_it_would_ignore(override, message):
    with pytest.raises(ConfigError, match=message):
        invoke("rollout", "default", override)


def test_bench_rollout_refuses_a_recipe_with_adapters(tmp_path):
    recipe = tmp_path / "adapters.yaml"
    recipe.write_text("policy: {lora: {rank: 8, path: adapters}}\n")
    with pytest.raises(ConfigError, match="policy.lora.path = 'adapters': .* leave these adapters out"):
        invoke("rollout", str(recipe))


def test_bench_rollout_refuses_options_that_the_recipe_decides():
    with pytest.raises(ValueError, match="--prompt 5: a recipe says this itself; override its key"):
        invoke("rollout", "default", "--prompt", "5")
