"""What the pacer loses on machines that are known exactly, against knowing the best and plain decoding."""

import pytest

from paceline.pacing.strategy import PLAIN, FixedPacer
from tests.pacing.simulated import head, make_pacer, random_world, strategies
from tests.pacing.world import BestPacer, World, long_tailed, simulate


@pytest.mark.parametrize("worlds", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_regret_over_random_worlds_is_small(worlds):
    """Two rollouts as RL would run them, nothing known before: against knowing the best strategy for each
    context, and plain decoding.
    """
    regrets, against_plain = [], []
    for seed in range(worlds):
        world, lengths = random_world(seed)
        pacer = make_pacer(*world.drafters)
        paced = sum(simulate(world, pacer, lengths, seed=i).seconds for i in range(2))
        best = sum(
            simulate(world, BestPacer(world, strategies(*world.drafters)), lengths, seed=i).seconds
            for i in range(2)
        )
        plain = 2 * simulate(world, FixedPacer(PLAIN), lengths).seconds
        regrets.append(paced / best - 1)
        against_plain.append(paced / plain - 1)
    assert sum(regrets) / len(regrets) < 0.03, regrets
    assert max(regrets) < 0.12, regrets
    assert max(against_plain) < 0.01, against_plain


def test_pacer_beats_every_fixed_strategy_where_the_best_one_changes():
    """256 requests with a long tail on a machine like an H200 with an 8B policy: plain or shallow first, deep
    in the tail.
    """
    world, lengths = World({"eagle": head(0.8, 0.78, 0.76, 0.74, 0.7)}), long_tailed(256, 300)
    pacer = make_pacer("eagle")
    first, second = (simulate(world, pacer, lengths, seed=i) for i in range(2))
    fixed = {s: simulate(world, FixedPacer(s), lengths).seconds for s in [PLAIN, *strategies("eagle")]}
    assert first.seconds < 0.95 * min(fixed.values()), (first.seconds, fixed)
    assert second.seconds < 0.90 * min(fixed.values()), (second.seconds, fixed)
    assert (
        second.seconds
        < 1.03 * simulate(world, BestPacer(world, strategies("eagle")), lengths, seed=1).seconds
    )
    by_running = list(zip(second.running, (s.count for s in second.strategies), strict=True))
    assert (
        max(k for running, k in by_running if running > 64)
        <= 2
        < 5
        <= max(k for running, k in by_running if running <= 8)
    ), "deeper in the tail"


@pytest.mark.parametrize(
    "seconds_per_token, switch_seconds",
    [(1e-5, 0.0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2.5e-4, 5e-3), (2e-3, 5e-2)))],
)
def test_drafter_that_is_never_right_costs_under_two_percent(seconds_per_token, switch_seconds):
    world = World({"bad": head(0.0, seconds_per_token=seconds_per_token, switch_seconds=switch_seconds)})
    for requests, mean in ((256, 300), (16, 300), (64, 100)):
        lengths = long_tailed(requests, mean)
        paced, plain = (
            simulate(world, make_pacer("bad"), lengths),
            simulate(world, FixedPacer(PLAIN), lengths),
        )
        assert paced.seconds < 1.02 * plain.seconds, (requests, mean)
        assert any(strategy.count for strategy in paced.strategies), "it was given a chance"


@pytest.mark.parametrize("names", [pytest.param("a", marks=pytest.mark.slow), "abc"])
@pytest.mark.parametrize(
    "seconds_per_token, switch_seconds",
    [
        (1e-5, 5e-2),
        pytest.param(2e-3, 5e-2, marks=pytest.mark.slow),
        pytest.param(2.5e-4, 5e-3, marks=pytest.mark.slow),
    ],
)
def test_drafter_that_must_catch_up_costs_under_two_percent_in_short_rollouts(
    names, seconds_per_token, switch_seconds
):
    """Three of them no more than one, and from the first rollout on: what a switch may cost is counted before
    one was seen.
    """
    world = World(
        {
            name: head(0.0, seconds_per_token=seconds_per_token, switch_seconds=switch_seconds)
            for name in names
        }
    )
    for requests, mean in ((64, 100), (8, 100), (128, 20)):
        lengths, pacer = long_tailed(requests, mean), make_pacer(*names, catch_up=0.1)
        plain = simulate(world, FixedPacer(PLAIN), lengths).seconds
        rollouts = [simulate(world, pacer, lengths, seed=i) for i in range(14)]
        assert rollouts[0].seconds < 1.02 * plain, (requests, mean)
        assert sum(r.seconds for r in rollouts) < 1.02 * len(rollouts) * plain, (requests, mean)
        assert any(strategy.count for r in rollouts for strategy in r.strategies), (
            "once there is time for a switch it is given a chance"
        )


def test_drafters_share_one_budget():
    """Their catching up is not declared, and each costs ten steps: the first trial is paid for before there
    is another.
    """
    world, lengths = (
        World({name: head(0.0, seconds_per_token=1e-5, switch_seconds=5e-2) for name in "abc"}),
        long_tailed(8, 100),
    )
    plain = simulate(world, FixedPacer(PLAIN), lengths).seconds
    pacer = make_pacer("a", "b", "c")
    rollouts = [simulate(world, pacer, lengths, seed=i) for i in range(16)]
    assert rollouts[0].seconds < 1.005 * plain + 5e-2, "a trial cannot be cheaper than one switch"
    assert sum(r.seconds for r in rollouts) < 1.02 * len(rollouts) * plain
    assert {s.drafter for r in rollouts for s in r.strategies} == {"", "a", "b", "c"}, (
        "everybody was given a chance"
    )


@pytest.mark.slow
def test_drafter_that_fails_at_the_full_batch_may_still_win_in_the_tail():
    """A drafter that is right only late in long responses: trials, the guard and what a rollout begins with
    go by the situation.
    """
    world, lengths = random_world(129)
    pacer, best = make_pacer(*world.drafters), BestPacer(world, strategies(*world.drafters))
    for i in range(6):
        paced, known = simulate(world, pacer, lengths, seed=i), simulate(world, best, lengths, seed=i)
        assert paced.seconds < 1.02 * known.seconds, i
        assert sum(s.count > 0 for s in paced.strategies[-500:]) > 400, "in the tail it wins"


def test_pacer_stays_plain_on_a_machine_with_slow_verification():
    """Where verifying k tokens costs k steps, as on a CPU, nothing but an excellent drafter pays."""
    world = World({"history": head(0.3, seconds_per_token=1e-6)}, weights_seconds=1e-5, token_seconds=1e-3)
    lengths = long_tailed(64, 200)
    paced, plain = (
        simulate(world, make_pacer("history"), lengths),
        simulate(world, FixedPacer(PLAIN), lengths),
    )
    assert paced.seconds < 1.02 * plain.seconds
    assert sum(s is PLAIN or s == PLAIN for s in paced.strategies) > 0.95 * len(paced.strategies)
