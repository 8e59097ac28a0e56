"""Modes in which a step does not wait for everything: whole runs on a tiny policy."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import ConfigError, load_config
from paceline.loop import train
from paceline.rollout.staleness import StepRules
from paceline.tasks.running_sums import RunningSums
from paceline.types import Score
from tests.length_reward import pay_for_length
from tests.loop_helpers import comparable_metrics, make_tiny_policy, tiny_config


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def length_reward(monkeypatch):
    monkeypatch.setattr(RunningSums, "score", pay_for_length)


NO_DRAFTER = ("rollout.speculation.pacing=adaptive", "rollout.speculation.max_running=0")
# Few enough run together that groups finish one after the other, and an update finds others halfway.
STAGGERED = ("rollout.max_running=6", "rollout.max_lag=2", "rollout.mode=partial")


def trained(run) -> list[dict[str, float]]:
    return [record for record in comparable_metrics(run) if record["kind"] == "train"]


def run(policy, tmp_path, name, *extra):
    small = ("eval.every=0", "eval.problems=1", "rollout.speculation.drafters=[]", *NO_DRAFTER, "run.steps=4")
    return train(tiny_config(policy, tmp_path, name, *small, *extra)).summary.run


# -- what a step may learn from -------------------------------------------------------------------


@given(
    seed=st.integers(0, 1 << 32),
    prompts=st.integers(1, 4),
    max_lag=st.integers(0, 3),
    on_stale=st.sampled_from(["wait", "drop"]),
    learning=st.booleans(),
    extra=st.integers(0, 12),
)
@settings(max_examples=300, deadline=None)
def test_step_rules_bound_lag_in_any_order_of_completion(seed, prompts, max_lag, on_stale, learning, extra):
    """Groups finish in a random order; with `learning`, prompts also go in while the learner works."""
    rng = random.Random(seed)
    most = (max_lag + 1) * prompts
    in_flight = min(prompts + extra, most) if on_stale == "wait" else prompts + extra
    rules = StepRules(prompts, in_flight, max_lag, on_stale)
    groups: list[list] = []  # [born, complete]
    for version in range(12):
        groups = [group for group in groups if not rules.expired(version, group[0])]
        groups += [[version, False] for _ in range(rules.places(version, [born for born, _ in groups]))]
        while True:
            complete = [group for group in groups if group[1]]
            unfinished = [born for born, done in groups if not done]
            chosen = rules.choose(version, [born for born, _ in complete], unfinished)
            if chosen is not None:
                break
            assert unfinished, "waits although nothing can finish any more"
            rng.choice([group for group in groups if not group[1]])[1] = True
        taken = [complete[i] for i in chosen]
        assert len(taken) == prompts and all(0 <= version - born <= max_lag for born, _ in taken)
        groups = [group for group in groups if all(group is not other for other in taken)]
        if learning:
            more = rules.places(version, [born for born, _ in groups], learning=True)
            groups += [[version, False] for _ in range(more)]
        for group in groups:
            group[1] = group[1] or rng.random() < 0.3
        if on_stale == "wait":
            assert not any(rules.expired(version + 1, born) for born, _ in groups), "would be lost"


# -- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sync(policy, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunningSums, "score", pay_for_length)
        return run(policy, tmp_path_factory.mktemp("sync"), "sync")


def test_partial_mode_without_extra_prompts_equals_sync(policy, tmp_path, sync):
    """With no more prompts in flight than a step learns from, no group outlives the step."""
    other = run(policy, tmp_path, "partial", "rollout.mode=partial", "rollout.prompts_in_flight=4")
    own = trained(other)
    assert all(record["rollout/lag_max"] == 0 for record in own)
    for record, plain in zip(own, trained(sync), strict=True):
        assert {key: record[key] for key in plain} == plain


def test_partial_mode_learns_from_responses_that_crossed_updates(policy, tmp_path):
    metrics = trained(run(policy, tmp_path, "partial", *STAGGERED))
    assert all(record["rollout/lag_max"] <= 2 and record["rollout/samples"] == 16 for record in metrics)
    assert any(record["rollout/lag_mean"] > 0 for record in metrics)
    assert any(record["rollout/crossed_updates"] > 0 for record in metrics)
    assert any(record["rollout/recomputed_tokens"] > 0 for record in metrics)


TREES = ("drafters=[history]", "shape=tree", "tokens=7", "pacing=fixed", "max_running=64")
# What the engine learns on its way, and who runs with whom hangs on.
LEARNED = {
    "nothing": (),
    "lengths": ("rollout.admission=longest", "task.train_problems=6"),
    "trees": tuple(f"rollout.speculation.{key}" for key in TREES),
}


@pytest.mark.slow
@pytest.mark.parametrize("learned", LEARNED)
def test_partial_mode_repeats_for_the_same_seed_and_after_a_resume(policy, tmp_path, learned):
    mode = (*STAGGERED, "checkpoint.every=2", *LEARNED[learned], "run.steps=6")
    whole = run(policy, tmp_path, "whole", *mode)
    if learned == "nothing":
        assert trained(run(policy, tmp_path, "again", *mode)) == trained(whole)
    run(policy, tmp_path, "halves", *mode, "run.steps=2")
    halves = tmp_path / "halves"
    saved = json.loads((halves / "checkpoints/step_000002/under_way.json").read_text())
    assert saved["groups"] and any(s["tokens"] for group in saved["groups"] for s in group["samples"])
    train(load_config(str(halves / "config.yaml"), ["run.steps=6"]), resume=halves)
    assert trained(halves) == trained(whole)


@pytest.mark.slow
@pytest.mark.parametrize("stragglers", ["abort", "carry"])
def test_oversample_mode_measures_dropped_stragglers(policy, tmp_path, stragglers):
    mode = ("rollout.mode=oversample", f"rollout.stragglers={stragglers}", "rollout.prompts_in_flight=7")
    metrics = trained(run(policy, tmp_path, stragglers, *mode))
    assert all(record["rollout/lag_max"] == 0 and record["rollout/stragglers"] == 3 for record in metrics)
    assert all(record["rollout/length_bias"] <= record["rollout/length_max"] for record in metrics)
    state = json.loads((tmp_path / stragglers / "checkpoints/step_000004/under_way.json").read_text())
    assert len(state["carried"]) == (3 if stragglers == "carry" else 0)


@pytest.mark.slow
def test_on_stale_drop_drops_and_counts_groups_past_max_lag(policy, tmp_path):
    mode = ("rollout.mode=partial", "rollout.max_lag=0", "rollout.on_stale=drop")
    metrics = trained(run(policy, tmp_path, "drop", *mode, "rollout.prompts_in_flight=8"))
    assert all(record["rollout/lag_max"] == 0 for record in metrics)
    assert sum(record["rollout/dropped_stale"] for record in metrics) == 4 * (len(metrics) - 1)


@pytest.mark.slow
def test_dynamic_sampling_in_partial_mode_drops_groups_without_signal(policy, tmp_path, monkeypatch):
    def every_other_alike(self, problem, response, truncated):
        return Score(sum(map(ord, response)) / 1e4 if int(problem.answer) % 2 else 1.0, correct=True)

    monkeypatch.setattr(RunningSums, "score", every_other_alike)
    mode = ("rollout.mode=partial", "learning.dynamic_sampling_rounds=10", "task.train_problems=40")
    metrics = trained(run(policy, tmp_path, "dynamic", *mode))
    assert sum(record["rollout/dropped_groups"] for record in metrics) > 0
    assert all(record["rollout/zero_variance_groups"] == 0 for record in metrics)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["rollout.max_lag=2"], "rollout.max_lag = 2 does not apply to rollout.mode = 'sync'"),
        (["rollout.mode=partial", "rollout.stragglers=carry"], "only to oversample"),
        (["rollout.mode=partial", "rollout.prompts_in_flight=8"], "at least rollout.prompts_per_step = 16"),
        (["rollout.mode=async", "rollout.prompts_in_flight=64"], "use rollout.on_stale=drop"),
        (["rollout.mode=partial", "rollout.on_update=keep", "rollout.precision=fp8+kv"], "would hold two"),
        (["rollout.mode=async", "rollout.precision=fp8+kv"], "precision=fp8, or mode=partial"),
        (["rollout.mode=async", "rollout.precision=kv"], "precision=base, or mode=partial"),
    ],
)
def test_modes_refuse_unsupported_keys_by_name(overrides, message):
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides)
    assert message in str(error.value)
