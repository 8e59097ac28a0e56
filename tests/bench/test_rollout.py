"""What `paceline bench rollout` makes of a rollout's statistics."""

from paceline.bench.recipe import rollout_config
from paceline.bench.recipe_rollout import bench_recipe_rollout
from paceline.bench.rollout import step_ms_by_running
from paceline.bench.setup import recipe_policy
from paceline.stats import RolloutStats


def test_step_ms_are_by_running_rows():
    stats = RolloutStats(running=[3, 4, 1, 1], step_seconds=[0.010, 0.020, 0.004, 0.006])
    assert step_ms_by_running(stats) == {1: 5.0, 4: 15.0}


def test_step_ms_are_empty_if_one_step_has_anothers_time():
    stats = RolloutStats(running=[3, 4, 1], step_seconds=[0.010, -0.150, 0.700])
    assert step_ms_by_running(stats) == {}


def test_recipe_rollout_has_its_own_drafters_and_lengths():
    small = ["task.train_problems=8", "task.eval_problems=1", "rollout.max_tokens=24", "run.device=cpu"]
    speculation = ["rollout.speculation.pacing=fixed", "rollout.speculation.drafters=[eagle]"]
    config = rollout_config("default", [*small, *speculation, "rollout.speculation.tokens=3"])
    point = bench_recipe_rollout(config, *recipe_policy(config), requests=12, repeats=1)
    assert point.requests == 12 and point.tokens <= 12 * 24 and point.accept_length > 1.5
