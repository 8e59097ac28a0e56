"""When a head learns during a run: after a fall, while acceptance rises, and within its time."""

import random

import pytest

from paceline.drafting.when import PATIENCE, TRIAL_ROLLOUTS, AutoMonitor, DriftMonitor, TimeBudget


def learns(monitor, chances: list[float], drafts: int, seed: int = 0, updates: bool = True) -> list[bool]:
    """What it says of rollouts in which each draft's first token is accepted with these chances."""
    rng = random.Random(seed)
    said = []
    for chance in chances:
        said.append(monitor.update(sum(rng.random() < chance for _ in range(drafts)) / drafts, drafts))
        if updates and said[-1]:
            monitor.note_update()
    return said


@pytest.mark.parametrize("drafts", [32, 200, 2000])
def test_chance_does_not_make_it_learn(drafts):
    assert sum(sum(learns(DriftMonitor(), [0.85] * 100, drafts, seed)) for seed in range(5)) < 15  # of 500


def test_a_fall_does_and_its_end_ends_it():
    drift = DriftMonitor()
    assert not any(learns(drift, [0.85] * 6, 5000))
    assert learns(drift, [0.80, 0.81, 0.85, 0.85], 5000) == [True, True, False, False]


def test_a_slow_decline_does():
    assert sum(learns(DriftMonitor(), [0.85 - 0.002 * i for i in range(40)], 5000)) > 5


def test_a_rise_is_the_new_standard():
    drift = DriftMonitor()
    learns(drift, [0.7] * 6 + [0.9] * 4, 5000)
    assert learns(drift, [0.86], 5000) == [True]


def test_what_learning_does_not_bring_back_is_let_go():
    drift = DriftMonitor()
    learns(drift, [0.9] * 4, 5000)
    assert learns(drift, [0.7] * (PATIENCE + 3), 5000) == [True] * PATIENCE + [False] * 3
    assert learns(drift, [0.6], 5000) == [True], "and the next fall is noticed"


def test_what_has_not_drafted_yet_brings_nothing_back():
    """A head on probation, or replicas that had no time to learn, say nothing of the policy."""
    drift = DriftMonitor()
    learns(drift, [0.9] * 4, 5000)
    assert all(learns(drift, [0.7] * 3 * PATIENCE, 5000, updates=False))
    assert learns(drift, [0.7] * (PATIENCE + 1), 5000) == [True] * PATIENCE + [False]


def test_auto_tries_and_rests_where_a_frozen_head_is_enough():
    """Two trials from the first update on, of which the second is no better than the first."""
    said = learns(AutoMonitor(), [0.85] * 40, 5000)
    assert said == [True] * (2 * TRIAL_ROLLOUTS) + [False] * (40 - 2 * TRIAL_ROLLOUTS)


def test_auto_goes_on_while_acceptance_rises_and_begins_again_after_a_fall():
    auto = AutoMonitor()
    assert all(learns(auto, [0.3 + 0.01 * i for i in range(30)], 5000))
    assert not all(learns(auto, [0.6] * 10, 5000)), "it has settled"
    assert not any(learns(auto, [0.6] * 6, 5000))
    assert learns(auto, [0.55, 0.56], 5000) == [True, True]


def test_auto_concludes_nothing_from_a_trial_without_an_update():
    """A budget that saves up for one update over many steps has not been tried yet."""
    auto = AutoMonitor()
    assert all(learns(auto, [0.5] * 6 * TRIAL_ROLLOUTS, 5000, updates=False))
    assert not all(learns(auto, [0.5] * 2 * TRIAL_ROLLOUTS, 5000))
    late = AutoMonitor()
    learns(late, [0.5] * TRIAL_ROLLOUTS + [0.4] * TRIAL_ROLLOUTS, 5000, updates=False)
    assert learns(late, [0.45] * TRIAL_ROLLOUTS, 5000)[-1], "more than when nothing was learned last"


@pytest.mark.parametrize("first", range(1, 2 * TRIAL_ROLLOUTS + 1))
def test_auto_tries_what_it_learned_whenever_the_first_update_comes(first):
    """A head that is better from the first update on, which may come late in a trial."""
    auto = AutoMonitor()
    assert all(learns(auto, [0.6] * first, 5000, updates=False))
    auto.note_update()
    assert all(learns(auto, [0.64 + 0.01 * i for i in range(20)], 5000)), "it rises all the time"


def test_time_is_granted_by_steps_saved_up_and_paid_back():
    budget = TimeBudget(0.01)
    budget.grant(10.0)
    assert budget.credit == pytest.approx(0.1)
    budget.spend(0.25)  # a slice that was longer than what was left
    budget.grant(10.0)
    assert budget.credit < 0
    for _ in range(100):
        budget.grant(10.0)
    assert budget.credit == pytest.approx(TimeBudget.SAVED_STEPS * 0.1), "not more than a few steps' worth"
