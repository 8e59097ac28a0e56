"""The pacing bench: the same tokens under every strategy, and figures that say where the time went."""

import pytest
from typer.testing import CliRunner

from paceline.bench.oracle import OracleDrafter
from paceline.bench.pacing import bench_pacing, stages
from paceline.bench.recipe import rollout_config
from paceline.bench.recipe_rollout import bench_recipe_pacing, bench_recipe_rollout
from paceline.bench.setup import bench_requests, recipe_policy
from paceline.cli.main import app
from paceline.config import ConfigError
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.graphs import buckets_up_to
from paceline.pacing.adaptive import AdaptivePacer, PacingSettings
from paceline.pacing.strategy import PLAIN, Decision, Strategy
from paceline.pacing.trace import TraceRow
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder

CONFIG = DecoderConfig("llama", 97, 32, 64, 2, 2, 1, 16, 256, eos_token_ids=(2,))


def test_every_rollout_is_told_by_stages(cpu_clock):
    lengths = [4, 4, 8, 8, 16, 40, 90]
    requests = bench_requests(lengths, 5, CONFIG.vocab_size)
    oracle = OracleDrafter(requests, [0.9])
    engine = Engine(
        Decoder(CONFIG).initialise(0), EngineSettings(max_running=8, kv_tokens=2048), drafters=[oracle]
    )
    pacer = AdaptivePacer(
        PacingSettings(tuple(buckets_up_to(8)), tuple(Strategy("oracle", k) for k in (1, 3)))
    )
    result = bench_pacing(engine, requests, [Strategy("oracle", 3)], pacer, 2, oracle.learn)
    assert [p.name for p in result.points] == ["plain", "oracle:3", "paced 1", "paced 2"]
    for point in result.points:
        record = point.record()
        assert point.identical == 1.0 and [stage["running"] for stage in record["stages"]] == [8, 4, 2, 1]
        assert sum(stage["steps"] for stage in record["stages"]) == point.decode_steps
        assert sum(stage["tokens"] for stage in record["stages"]) == sum(lengths), (
            "what was generated to warm up is not in it"
        )
        assert (
            0
            < sum(stage["disturbed_seconds"] for stage in record["stages"])
            < sum(stage["seconds"] for stage in record["stages"])
        )
    plain, fixed, first, _ = result.points
    assert [stage.steps for stage in plain.stages] == [8, 8, 24, 50]
    assert (
        plain.trial_steps == fixed.trial_steps == 0.0 < first.trial_steps < 0.5
        and 0 < first.trial_seconds < 1
    )


def test_stages_are_halves():
    trace = [TraceRow(Decision(PLAIN), 2, 2 * running, running, 0.1) for running in (9, 8, 5, 4, 3, 2, 1)]
    assert [(stage.running, stage.steps, stage.tokens) for stage in stages(trace)] == [
        (16, 2, 9),
        (8, 4, 13),
        (4, 4, 7),
        (2, 2, 2),
        (1, 2, 1),
    ]
    assert stages(trace)[1].seconds == pytest.approx(0.2)


def recipe(*overrides: str):
    small = ["task.train_problems=8", "task.eval_problems=1", "rollout.max_tokens=24", "run.device=cpu"]
    drafters = ["rollout.speculation.drafters=[history,eagle]", "rollout.speculation.tokens=3"]
    config = rollout_config("default", [*small, *drafters, *overrides], "pacing")
    return config, *recipe_policy(config)


@pytest.mark.parametrize("shape", [pytest.param("chain", marks=pytest.mark.slow), "tree"])
def test_a_recipes_own_drafters_precision_and_lengths(shape):
    config, policy, prompts = recipe(f"rollout.speculation.shape={shape}", "rollout.precision=fp8")
    said = []
    result = bench_recipe_pacing(config, policy, prompts, 12, [1, 3, 7], 1, said.append)
    tree = "tree" if shape == "tree" else ""
    fixed = [f"{name}:{tree}{count}" for name in ("history", "eagle") for count in (1, 3)]
    assert [point.name for point in result.points] == ["plain", *fixed, "paced 1"], "seven are too many"
    assert said == result.points and all(point.identical == 1.0 for point in said)
    assert (
        result.longest <= 24
        and {point.name: point for point in said}["eagle:" + tree + "3"].accept_length > 1.5
    )


def test_a_recipes_whole_rollout():
    config, policy, prompts = recipe(
        "rollout.speculation.pacing=fixed", "rollout.speculation.drafters=[eagle]"
    )
    point = bench_recipe_rollout(config, policy, prompts, requests=12, repeats=1)
    assert point.requests == 12 and point.tokens <= 12 * 24 and point.accept_length > 1.5
    with pytest.raises(ConfigError, match="measures an adaptive pacer"):
        bench_recipe_pacing(config, policy, prompts, 12, [1], 1, print)
    with pytest.raises(ConfigError, match="learning.lr = '1': `bench rollout` would ignore it"):
        rollout_config("default", ["learning.lr=1"], "rollout")


def test_a_recipe_takes_no_option_that_it_decides_itself():
    told = CliRunner().invoke(app, ["bench", "pacing", "default", "--acceptance", "0.5"])
    assert told.exit_code and "--acceptance = '0.5'" in str(told.output) + str(told.exception)
