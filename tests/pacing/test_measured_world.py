"""The pacer in a rollout as it was measured on an H200, where the best number of proposals changes with every
other bucket.
"""

import pytest

from paceline.pacing.adaptive import AdaptivePacer
from paceline.pacing.settings import PacingSettings
from paceline.pacing.strategy import PLAIN, FixedPacer
from tests.pacing.h200 import MEASURED, STRATEGIES, h200, lengths
from tests.pacing.world import BestPacer, Outcome, simulate


def test_measured_world_matches_its_measurements():
    world = h200()
    for running, proposed, context, ms in MEASURED:
        seconds = world.verify_seconds(running, proposed + 1, context)
        if proposed:
            seconds += world.drafters["oracle"].seconds(proposed, world.bucket(running))
        assert 1e3 * seconds == pytest.approx(ms, rel=0.05), (running, proposed)


@pytest.fixture(scope="module", params=(0, 1, 3))
def rollouts(request) -> tuple[list[Outcome], list[float], list[float]]:
    """Three rollouts of one pacer, as RL runs them; beside each, seconds of the best fixed strategy and of
    knowing the world.
    """
    world, wanted, seeds = h200(), lengths(), [100 * request.param + i for i in range(3)]
    pacer = AdaptivePacer(PacingSettings(world.buckets, STRATEGIES, request.param))
    paced = [simulate(world, pacer, wanted, seed) for seed in seeds]
    fixed = [
        min(simulate(world, FixedPacer(s), wanted, seed).seconds for s in STRATEGIES[:5]) for seed in seeds
    ]
    knowing = [simulate(world, BestPacer(world, list(STRATEGIES)), wanted, seed).seconds for seed in seeds]
    return paced, fixed, knowing


@pytest.mark.slow
def test_pacer_beats_the_best_fixed_strategy_from_the_first_rollout_on(rollouts):
    paced, fixed, _ = rollouts
    ratios = [outcome.seconds / best for outcome, best in zip(paced, fixed, strict=True)]
    assert ratios[0] < 0.99 and max(ratios[1:]) < 0.96, ratios


@pytest.mark.slow
def test_pacer_comes_close_to_the_best_possible_choice(rollouts):
    paced, _, knowing = rollouts
    regrets = [outcome.seconds / best - 1 for outcome, best in zip(paced, knowing, strict=True)]
    assert regrets[0] < 0.05 and max(regrets[1:]) < 0.012, regrets


@pytest.mark.slow
def test_pacer_trials_are_short_and_end(rollouts):
    paced, _, _ = rollouts
    trials = [
        sum(decision.reason == "trial" for decision in outcome.decisions) / len(outcome.decisions)
        for outcome in paced
    ]
    assert 0 < trials[0] < 0.15 and trials[2] < 0.03, trials


@pytest.mark.slow
def test_guard_does_not_rely_on_a_guessed_plain_time(rollouts):
    """Plain decoding is slower throughout, and where it never ran its time is not known: no reason to leave
    the drafter.
    """
    paced, _, _ = rollouts
    assert not any(decision.reason == "guard" for outcome in paced for decision in outcome.decisions)
    assert sum(decision.strategy == PLAIN for decision in paced[2].decisions) < 0.02 * len(paced[2].decisions)
