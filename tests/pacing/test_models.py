"""What the pacer believes: times as they were measured, guesses between them, acceptance that follows what is
seen.
"""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.pacing.acceptance import AcceptanceModel, emitted_by_count
from paceline.pacing.cost import CostModel
from paceline.pacing.settings import DEFAULT_TUNING
from paceline.pacing.situation import Situation, context_class
from tests.pacing.world import BUCKETS, SimulatedDrafter, World

QUERIES = (1, 2, 4, 8, 16)
points = st.lists(
    st.tuples(
        st.sampled_from(BUCKETS),
        st.sampled_from(QUERIES),
        st.sampled_from((100, 700, 3000)),
        st.floats(1e-3, 1.0),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(points)
def test_verify_times_are_positive_and_finite_for_any_measurements(measured):
    cost = CostModel(BUCKETS, QUERIES)
    for bucket, queries, context, seconds in measured:
        cost.update_verify(bucket, queries, context, seconds)
    for context in (100, 3000):
        table = np.array([cost.verify_times.seconds(bucket, context) for bucket in BUCKETS])
        assert np.isfinite(table).all() and (table > 0).all()


def test_verify_times_keep_measured_points_whatever_was_measured_elsewhere():
    """A machine that works in tiles: 96 tokens take longer than 128, and plain decoding of many rows longer
    than either.
    """
    measured = {
        (24, 4): 8.7e-3,
        (32, 4): 7.2e-3,
        (192, 1): 11.6e-3,
        (48, 2): 8.9e-3,
        (16, 8): 7.3e-3,
        (1, 1): 4.2e-3,
    }
    cost = CostModel(BUCKETS, QUERIES)
    for (bucket, queries), seconds in measured.items():
        cost.update_verify(bucket, queries, 300, seconds, 16)
    for (bucket, queries), seconds in measured.items():
        assert cost.verify_times.seconds(bucket, 300)[QUERIES.index(queries)] == pytest.approx(seconds), (
            bucket,
            queries,
        )
    assert 7.2e-3 < cost.verify_times.seconds(64, 300)[1] < 11.6e-3, (
        "a guess lies between what is known of fewer and of more tokens"
    )


def test_verify_times_of_a_slow_bucket_are_guessed_slow_for_other_queries():
    cost = CostModel(BUCKETS, QUERIES)
    for bucket in (8, 16, 32, 64, 128):
        for queries in (1, 2, 4) if bucket != 16 else (2,):
            cost.update_verify(
                bucket, queries, 300, 4e-3 + 1e-5 * bucket * queries + (2e-3 if bucket == 16 else 0.0), 16
            )
    assert np.allclose(cost.verify_times.seconds(16, 300)[:3], [6.16e-3, 6.32e-3, 6.64e-3], rtol=0.15)


def test_verify_times_are_measured_only_where_and_while_fresh():
    cost = CostModel(BUCKETS, QUERIES)
    cost.update_verify(30, 4, 700, 6e-3, 3)
    assert cost.is_measured(31, 4, 600) and cost.is_measured(32, 4, 1500) and cost.is_measured(32, 4, 100)
    assert (
        not cost.is_measured(33, 4, 700)
        and not cost.is_measured(30, 2, 700)
        and not cost.is_measured(30, 4, 9000)
    )
    for _ in range(DEFAULT_TUNING.stale_steps // 1024):
        assert cost.is_measured(30, 4, 700)
        cost.update_verify(8, 1, 700, 4e-3, 1024)
    assert not cost.is_measured(30, 4, 700)


def test_context_slope_is_learned_from_any_running_batch():
    """So that a strategy that ran when contexts were short is not thought to be faster than it is now."""
    cost, rng = CostModel(BUCKETS, QUERIES), random.Random(0)

    def seconds(queries: int, context: float) -> float:
        return (4e-3 + 1e-4 * queries + 3e-8 * 16 * context) * rng.gauss(1.0, 0.005)

    for queries in (1, 2, 4):
        cost.update_verify(16, queries, 1100, seconds(queries, 1100), 16)
    for context in range(1100, 2000, 50):
        cost.update_verify(16, 2, context, seconds(2, context), 16)
    assert cost.verify_times.slope == pytest.approx(3e-8, rel=0.2)
    for context in (1500, 2000, 4000):
        true = [4e-3 + 1e-4 * queries + 3e-8 * 16 * context for queries in (1, 2, 4)]
        assert np.allclose(cost.verify_times.seconds(16, context)[:3], true, rtol=0.04), context


def test_verify_times_of_unmeasured_points_follow_the_roofline():
    """A few measurements of a machine predict the rest of it within a few percent."""
    world, cost = World({}), CostModel(BUCKETS, QUERIES)
    for bucket in (1, 8, 64, 128, 256):
        for queries in (1, 4):
            for context in (200, 1200):
                cost.update_verify(
                    bucket, queries, context, world.verify_seconds(bucket, queries, context), 8
                )
    for running in (1, 3, 16, 30, 100):
        for context in (300, 2500):
            predicted = cost.verify_times.seconds(running, context)[:4]
            true = [world.verify_seconds(running, queries, context) for queries in QUERIES[:4]]
            assert np.allclose(predicted, true, rtol=0.12), (running, context)


def test_time_estimates_follow_a_change_and_resist_outliers():
    cost = CostModel(BUCKETS, QUERIES)
    for _ in range(10):
        cost.update_verify(8, 1, 100, 0.010, 16)
    cost.update_verify(8, 1, 100, 0.200, 1)
    assert cost.verify_times.seconds(8, 100)[0] < 0.0102
    for _ in range(20):
        cost.update_verify(8, 1, 100, 0.020, 16)
    assert cost.verify_times.seconds(8, 100)[0] == pytest.approx(0.020, rel=0.02)


def test_draft_times_are_kept_per_drafter():
    cost = CostModel(BUCKETS, QUERIES)
    assert cost.draft_seconds("eagle", [1, 7], 8).tolist() == [0, 0]
    cost.update_draft("eagle", 3, 8, 3e-3)
    assert np.allclose(cost.draft_seconds("eagle", [1, 3, 7], 4), 3e-3) and np.allclose(
        cost.draft_seconds("eagle", [3, 7], 4, at_worst=True), [3e-3, 7e-3]
    )
    cost.update_draft("eagle", 7, 8, 7e-3)
    assert np.allclose(cost.draft_seconds("eagle", [3, 5, 15], 8), [3e-3, 5e-3, 15e-3])
    cost.update_switch("eagle", 0.02)
    assert (
        cost.switch_seconds("eagle", 8, 300) == pytest.approx(0.02)
        and cost.switch_seconds("history", 8, 300) == 0
    )


def test_switch_seconds_assume_the_worst_until_measured():
    cost = CostModel(BUCKETS, QUERIES, {"draft_model": 0.1})
    assert cost.switch_seconds("draft_model", 8, 300) == 0, "there is nothing to compare with"
    cost.update_verify(8, 1, 300, 5e-3, 16)
    assert cost.switch_seconds("draft_model", 8, 300) == pytest.approx(0.1 * 300 * 5e-3), (
        "a tenth of decoding 300 tokens"
    )
    cost.update_switch("draft_model", 0.02)
    assert cost.switch_seconds("draft_model", 8, 300) == pytest.approx(0.02)
    again = CostModel(BUCKETS, QUERIES, {"draft_model": 0.1})
    again.load_state(json.loads(json.dumps(cost.state())))
    assert again.switch_seconds("draft_model", 8, 300) == pytest.approx(0.02)


def test_acceptance_is_estimated_at_every_depth_and_extrapolated_beyond():
    true = [0.9, 0.7, 0.5]
    model, rng = AcceptanceModel(7), np.random.default_rng(0)
    for _ in range(200):
        survivors = np.cumprod(rng.random((8, 3)) < true, axis=1).sum(0).tolist()
        model.update(Situation(0, 0), 8, survivors, 1)
    assert np.allclose(model.rates(Situation(0, 0))[:3], true, atol=0.12)
    assert np.allclose(model.rates(Situation(0, 0))[3:], model.rates(Situation(0, 0))[2], atol=0.02), (
        "untried depths lean on the one before"
    )
    assert model.emitted(Situation(0, 0))[3] == pytest.approx(1 + 0.9 + 0.63 + 0.315, abs=0.25)
    assert np.allclose(emitted_by_count(np.array([0.5, 0.5])), [1, 1.5, 1.75])


def test_acceptance_of_an_unseen_drafter_starts_low():
    model = AcceptanceModel(3)
    assert model.emitted(Situation(0, 0)).tolist() == [1, 1, 1, 1]
    model.update(Situation(0, 0), 16, (0, 0, 0), 1)
    assert model.emitted(Situation(0, 0))[3] == 1.0


def test_acceptance_follows_the_policy():
    model = AcceptanceModel(2)
    for _ in range(100):
        model.update(Situation(0, 0), 8, (8, 8), 1)
    assert model.rates(Situation(0, 0))[0] > 0.97
    for _ in range(4 * DEFAULT_TUNING.window_drafts // 8):
        model.update(Situation(0, 0), 8, (0, 0), 1)
    assert model.rates(Situation(0, 0))[0] < 0.05


def test_acceptance_differs_by_situation_and_a_new_one_starts_from_all():
    model = AcceptanceModel(1)
    for _ in range(100):
        model.update(Situation(4, 0), 8, (2,), 1)
        model.update(Situation(0, 2), 8, (7,), 1)
    short, long, unseen = (
        model.rates(where)[0] for where in (Situation(4, 0), Situation(0, 2), Situation(0, 3))
    )
    assert (
        short == pytest.approx(0.25, abs=0.05)
        and long == pytest.approx(0.875, abs=0.05)
        and short < unseen < long
    )
    assert [context_class(n) for n in (0, 511, 512, 1023, 1024, 5000)] == [0, 0, 1, 1, 2, 4]


def test_model_state_survives_json():
    rng = random.Random(0)
    cost, acceptance = CostModel(BUCKETS, QUERIES), AcceptanceModel(7)
    for _ in range(50):
        cost.update_verify(rng.choice(BUCKETS), rng.choice(QUERIES), rng.randrange(4000), rng.random())
        cost.update_draft("eagle", rng.choice((1, 3)), rng.choice(BUCKETS), rng.random())
        acceptance.update(Situation(rng.randrange(3), rng.randrange(3)), 8, (6, 3, 1), 1)
    cost.update_switch("eagle", 0.1)
    again, acceptance_again = CostModel(BUCKETS, QUERIES), AcceptanceModel(7)
    again.load_state(json.loads(json.dumps(cost.state())))
    acceptance_again.load_state(json.loads(json.dumps(acceptance.state())))
    assert np.array_equal(again.verify_times.seconds(7, 900), cost.verify_times.seconds(7, 900))
    assert again.switch_seconds("eagle", 7, 900) == cost.switch_seconds("eagle", 7, 900)
    assert np.array_equal(
        again.draft_seconds("eagle", [1, 2, 9], 7), cost.draft_seconds("eagle", [1, 2, 9], 7)
    )
    assert np.array_equal(acceptance_again.rates(Situation(1, 1)), acceptance.rates(Situation(1, 1)))


def test_simulated_world_matches_its_specification():
    """The oracle the pacer is measured against: simulated acceptance gives the closed form's rate."""
    from paceline.pacing.strategy import FixedPacer, Strategy
    from tests.pacing.world import simulate

    world = World({"d": SimulatedDrafter(lambda depth, context, step: 0.7)}, attention_seconds=0.0)
    outcome = simulate(world, FixedPacer(Strategy("d", 3)), [3000] * 16)
    tokens = 3000 * 16
    assert tokens / outcome.seconds == pytest.approx(world.rate(Strategy("d", 3), 16, 0, 0), rel=0.03)


def test_acceptance_updates_in_one_situation_leave_the_others_unchanged():
    model = AcceptanceModel(2)
    model.update(Situation(0, 0), 100, (10, 1), 10)
    model.update(Situation(0, 3), 100, (90, 80), 10)
    before = model.rates(Situation(0, 3))
    assert model.has_seen(Situation(0, 3)) and not model.has_seen(Situation(0, 2))
    model.fade(Situation(0, 0), 0.1)
    model.update(Situation(0, 0), 20, (0, 0), 4)
    assert model.rates(Situation(0, 0))[0] < 0.25 and np.allclose(
        model.rates(Situation(0, 3)), before, atol=0.1
    )
    model.restart(Situation(0, 0), 64, (0, 0))
    assert model.rates(Situation(0, 0))[0] == 0 and model.rates(Situation(0, 3))[0] > 0.7
    assert model.rates(Situation(0, 2))[0] == 0, (
        "of a class of which nothing is known, what was seen last is believed"
    )
