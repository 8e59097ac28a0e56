"""In whose time a head learns, and how much of it."""

import contextlib
import random

import pytest

from paceline.config import OnlineDrafterConfig, load_config
from paceline.drafting.examples import Example, longest_texts
from paceline.drafting.online import OnlineDrafter
from paceline.drafting.publishing import Probation
from paceline.drafting.run_drafter import RunDrafter
from tests.drafting.online_helpers import (
    SMALL,
    Recorded,
    follow,
    groups_of,
    let_slices_take,
    online,
    states_of,
)


def test_auto_stays_within_its_budget_and_uses_idle_time(moved, monkeypatch):
    """A clock on which every slice takes a second: 1% of steps of 250 s is 2.5 slices each."""
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1, batch=2, budget=0.01)
    drafter.probation = Probation(proven=True)  # comparisons take time, too
    let_slices_take(1.0, drafter, monkeypatch)
    groups = groups_of(policy, 40)
    steps = [follow(drafter, step, groups, 250.0, recorded=True) for step in range(1, 9)]
    spent = [metrics["time/drafter_displaced"] for metrics in steps]
    assert 8 * 2.5 - 1 <= sum(spent) - 1 <= 8 * 2.5, "the first slice sets libraries up"
    answers = iter([True] * 5 + [False] * 100)
    drafter.note_wait(100.0)
    drafter.learn_while(lambda: next(answers))
    metrics = drafter.take_metrics()
    assert metrics["time/drafter_idle"] > 0 and metrics["time/drafter_displaced"] == 1, (
        "the slice that was running when waiting ended"
    )
    always = online(policy, head, when="always", unroll=1)
    follow(always, 1, groups)
    assert not list(always.work(lambda: False)), "which learns in its own time"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_auto_adds_less_than_its_share_whatever_slices_take(moved, monkeypatch, seed):
    """What a slice takes is saved up before it begins; learning continues all the same."""
    policy, head = moved
    rng = random.Random(seed)
    drafter = online(policy, head, when="auto", unroll=1, batch=2, budget=0.01)
    drafter.probation = Probation(proven=True)
    let_slices_take(lambda: rng.uniform(0.8, 1.4), drafter, monkeypatch)
    groups = groups_of(policy, 8)
    seconds = [rng.uniform(60.0, 200.0) for _ in range(30)]
    steps = [follow(drafter, step, groups, s, recorded=True) for step, s in enumerate(seconds, 1)]
    share = sum(metrics["time/drafter_displaced"] for metrics in steps[1:]) / sum(seconds[1:])
    assert 0.008 < share < 0.01, "in the first step a slice sets libraries up"


def seconds_of(
    drafter: OnlineDrafter, groups, monkeypatch, steps: int, a_slice: float, wait=0.0, copies=0.0, judging=0.0
) -> float:
    """Makes steps of 100 s, of which 1% is a second; returns the seconds that learning added to them.

    Each waits so long for rewards; states that are asked for take so long to copy, and a comparison to make.
    """
    clock = let_slices_take(a_slice, drafter, monkeypatch)

    def quality(head, weights, makes_states) -> float:
        clock[0] += judging / 2
        return 0.5

    drafter.judge.quality_of = quality
    drafter.auto.note_update = lambda overlap: None  # what updates bring is no matter here
    work = RunDrafter(drafter, Recorded(), load_config(None, SMALL), warn=print).work_in(
        contextlib.nullcontext
    )
    added = 0.0
    for step in range(1, steps + 1):
        began = clock[0]
        work(lambda began=began: clock[0] < began + wait)
        drafter.note_wait(max(wait, clock[0] - began))
        drafter.expect(groups)
        asked = bool(drafter.texts.tap.wanted)
        states = {text.tokens: states_of(drafter, text) for text in drafter.texts.chosen} if asked else {}
        drafter.texts.tap.take_seconds = lambda asked=asked: (copies if asked else 0.0, 0.0)
        added += drafter.follow(step, states, 100.0)["time/drafter_displaced"]
    return added


@pytest.mark.parametrize(("copies", "learns"), [(0.5, True), (1.2, True), (3.0, True), (30.0, False)])
def test_auto_learns_less_often_where_copies_take_most_of_the_budget(moved, monkeypatch, copies, learns):
    """What a step of learning takes besides slices is saved up for, too; more than 8 steps' share is not."""
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1, batch=1)
    drafter.probation = Probation(proven=True)
    added = seconds_of(drafter, groups_of(policy, 4), monkeypatch, 24, a_slice=0.5, copies=copies)
    assert drafter.due == learns and added < 24 + 2 * copies
    assert drafter.average.updates >= 8 or not learns


@pytest.mark.parametrize(("judging", "steps"), [pytest.param(10.0, 30, marks=pytest.mark.slow), (20.0, 40)])
def test_auto_does_not_give_up_over_the_time_of_a_comparison(moved, monkeypatch, judging, steps):
    """It is made now and then: ten or twenty steps' budget, while an update takes half of one.

    Twenty are more than anything that is made in every step may owe.
    """
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1, batch=1)
    added = seconds_of(drafter, groups_of(policy, 4), monkeypatch, steps, a_slice=0.5, judging=judging)
    assert drafter.due and drafter.average.updates > 8 and judging < added < steps + 1


def test_auto_rests_where_its_budget_is_too_small_for_an_update(moved, monkeypatch):
    """A second a slice and 16 slices an update: 1% of steps of 50 s would take 32 of them, of 250 s 7."""
    policy, head = moved
    said: list[str] = []
    groups = groups_of(policy, 60)
    config = OnlineDrafterConfig(when="auto", unroll=1, batch=16, budget=0.01)
    for seconds, rests in ((50.0, True), (250.0, False)):
        said.clear()
        drafter = OnlineDrafter(policy, head, config, seed=0, warn=said.append)
        let_slices_take(1.0, drafter, monkeypatch)
        for step in range(1, 9):
            follow(drafter, step, groups, seconds, recorded=True)
        assert drafter.due is not rests
        assert len(said) == int(rests) and all("online.budget = 0.01" in line for line in said)
    said.clear()
    drafter = OnlineDrafter(policy, head, OnlineDrafterConfig(), seed=0, warn=said.append)
    let_slices_take(1.0, drafter, monkeypatch)
    for step in (1, 2):
        follow(drafter, step, groups, 1.0, recorded=True)
    assert not drafter.due and not said, "it was not asked for"


def test_idle_work_ends_at_once(moved):
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1, batch=4)
    drafter.plan("1", [Example(text, 1, 0) for text in longest_texts(groups_of(policy, 16), 640)], 640)
    asked = []
    work = drafter.work(lambda: len(asked) >= 2 or asked.append(1) is not None)
    assert drafter.has_work and len(list(work)) == 2, "asked before every slice"


def test_closed_head_learns_nothing_more(moved, monkeypatch):
    """Rollouts that come then are compared with plain decoding."""
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1)
    run_drafter = RunDrafter(drafter, Recorded(), load_config(None, SMALL), warn=print)
    monkeypatch.setattr(type(drafter), "has_work", True)
    asked = []
    drafter.learn_while = lambda waiting: asked.append(waiting())
    work = run_drafter.work_in(contextlib.nullcontext)
    work(lambda: True)
    assert asked == [True]
    run_drafter.close()
    work(lambda: True)
    assert asked == [True]
