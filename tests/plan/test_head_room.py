"""A head that learns by default takes no memory that the run would use."""

import json

import pytest
import torch
from typer.testing import CliRunner

from paceline import session
from paceline.cli import plan as plan_command
from paceline.cli.main import app
from paceline.config import ConfigError, load_config
from paceline.drafting.eagle_folder import save_eagle
from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.plan.head_room import NO_ROOM, SMALLER_POOL, settle_learning
from paceline.plan.machine import Machine
from paceline.plan.plan import make_plan
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import save_policy
from tests.plan.shapes import SMALL_SHAPES

SHAPE = SMALL_SHAPES["qwen3"]
NEVER = "rollout.speculation.online.share=0"
# GPUs on which nothing fits, on which it does without a head that learns, and on which both do.
TOO_SMALL, TIGHT, LARGE = 560_000_000, 620_000_000, 2_000_000_000


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads") / "eagle"
    policy = Decoder(SHAPE).initialise(0)
    save_eagle(EagleHead(config_for(SHAPE, (0, 1))).initialise(policy, 0), folder)
    keys = "rollout.max_tokens=40", "eval.max_tokens=40", "task.max_prompt_tokens=24"
    speculation = "rollout.speculation.drafters=[eagle]", f"rollout.speculation.eagle_path={folder}"
    return [*keys, *speculation, "rollout.max_running=64"]


def plan_of(config, total_bytes: int):
    return make_plan(config, SHAPE, torch.bfloat16, Machine("test", total_bytes, taken_bytes=0))


def settled(overrides, total_bytes: int, *more: str):
    config, plans = settle_learning(
        load_config(None, [*overrides, *more]), lambda one: {"run": plan_of(one, total_bytes)}
    )
    return config.rollout.speculation.online.share, plans["run"]


@pytest.mark.slow
def test_learning_head_by_default_costs_the_run_nothing_on_any_gpu(overrides):
    frozen = load_config(None, [*overrides, NEVER])
    shares = []
    for total_bytes in (TOO_SMALL, TIGHT, 780_000_000, 830_000_000, 850_000_000, 900_000_000, LARGE):
        share, plan = settled(overrides, total_bytes)
        without = plan_of(frozen, total_bytes)
        shares.append(share)
        assert plan.problem == without.problem if without.problem else not plan.problem
        assert (plan.sleeps, plan.recompute) == (without.sleeps, without.recompute)
        assert plan.kv_tokens >= SMALLER_POOL * without.kv_tokens
    assert shares == sorted(shares) and {*shares} == {0, 0.01}, "given memory, it learns"


def test_recipe_that_asks_for_a_learning_head_gets_it(overrides):
    assert settled(overrides, TIGHT)[0] == 0
    share, plan = settled(overrides, TIGHT, "rollout.speculation.online.share=0.02")
    assert share == 0.02 and plan.problem and plan.bytes_of("drafter's optimiser") > 0
    assert settled(overrides, LARGE, NEVER)[0] == 0


@pytest.mark.slow
def test_session_follows_the_settled_recipe(overrides, monkeypatch):
    """The refusal of a run that does not fit at all speaks of what fits without a head."""
    config = load_config(None, [*overrides, "policy.dtype=bfloat16"])

    def plan_on(total_bytes: int):
        monkeypatch.setattr(session, "gpu_at_hand", lambda: Machine("test", total_bytes, taken_bytes=0))
        return session.plan_gpu(config, SHAPE, torch.device("cuda"), learns=True)

    assert plan_on(LARGE)[0] is config
    settled_config, plan = plan_on(TIGHT)
    assert settled_config.rollout.speculation.online.share == 0 and not plan.problem
    with pytest.raises(ConfigError, match="what would fit: rollout.max_running=16") as refused:
        plan_on(TOO_SMALL)
    assert "online" not in str(refused.value)


def test_fresh_head_learns_at_any_cost(overrides):
    """There is no such recipe without learning, and nothing else would make it draft."""
    assert settled(overrides, TIGHT, "rollout.speculation.eagle_path=fresh")[0] == 0.01


def test_plan_command_reports_a_head_that_does_not_learn_in_either_form(overrides, tmp_path, monkeypatch):
    """The plan is that of a run without a head that learns."""
    folder = tmp_path / "policy"
    save_policy(Decoder(SHAPE).initialise(0), folder)
    monkeypatch.setattr(
        plan_command, "_machine", lambda gpu, memory_gb: Machine("test", TIGHT, taken_bytes=0)
    )
    command = ["plan", *overrides, f"policy.path={folder}"]
    shown = CliRunner().invoke(app, command, catch_exceptions=False).stdout
    tree = json.loads(CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False).stdout)
    assert NO_ROOM in shown and tree["notes"] == [NO_ROOM]
