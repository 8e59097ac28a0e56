"""In whose time a head learns, and how much of it."""

import contextlib
import random

import pytest

from paceline.config import OnlineDrafterConfig, load_config
from paceline.drafting import state_tap, step_texts
from paceline.drafting.examples import Example, longest_texts
from paceline.drafting.online import OnlineDrafter
from paceline.drafting.publishing import Probation
from paceline.drafting.run_drafter import RunDrafter
from paceline.learning.batch import pack
from tests.drafting.online_helpers import (
    SMALL,
    Recorded,
    follow,
    groups_of,
    let_slices_take,
    online,
    states_of,
)


def test_auto_stays_within_its_budget_and_uses_time_that_nobody_needs(moved, monkeypatch):
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


def test_auto_saves_up_for_several_slices(moved, monkeypatch):
    """A second a slice, 1% of steps of 90 s: every few steps three slices or more, and nothing between."""
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1, batch=2, budget=0.01)
    drafter.probation = Probation(proven=True)
    let_slices_take(1.0, drafter, monkeypatch)
    groups = groups_of(policy, 40)
    steps = [follow(drafter, step, groups, 90.0, recorded=True) for step in range(1, 13)]
    spent = [metrics["time/drafter_displaced"] for metrics in steps]
    assert set(spent[1:]) <= {0.0, 3.0, 4.0} and 0.9 * 11 - 4 <= sum(spent[1:]) <= 0.9 * 12, spent


@pytest.mark.parametrize("seed", range(3))
def test_auto_adds_less_than_its_share_whatever_slices_take(moved, monkeypatch, seed):
    """What a slice takes is saved up before it begins; learning goes on all the same."""
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


def test_steps_that_only_save_up_copy_no_states(moved, monkeypatch):
    """A second a slice, 1% of steps of 50 s: six steps save up for the next three slices.

    In the step after a new head was published its texts may have to say how good it is.
    """
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1, batch=2, budget=0.01)
    drafter.probation = Probation(proven=True)
    let_slices_take(1.0, drafter, monkeypatch)
    groups = groups_of(policy, 8)
    asked, learned = [], []
    for step in range(1, 25):
        drafter.expect(groups)
        asked.append(bool(drafter.texts.tap.wanted))
        assert drafter.wants_states == asked[-1] or not drafter.texts.are_passed_over
        needs_memory = drafter.needs_memory
        drafter.observe(0.9, 5000)
        states = {text.tokens: states_of(drafter, text) for text in drafter.texts.chosen} if asked[-1] else {}
        metrics = drafter.follow(step, states, 50.0)
        learned.append(metrics["time/drafter_displaced"] > 0)
        assert needs_memory == learned[-1] or step == 1
    assert 3 <= sum(learned) <= 6, learned
    after_learning = [False, *learned[:-1]]
    assert asked == [True] + [a or b for a, b in zip(learned[1:], after_learning[1:], strict=True)]


def test_idle_time_is_used_in_steps_that_save_up(moved, monkeypatch):
    """A second a slice, 1% of steps of 50 s, and ten seconds of waiting for rewards in each."""
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1, batch=2, budget=0.01)
    drafter.probation = Probation(proven=True)
    clock = let_slices_take(1.0, drafter, monkeypatch)
    run_drafter = RunDrafter(drafter, Recorded(), load_config(None, SMALL), warn=print)
    work = run_drafter.work_in(contextlib.nullcontext)
    groups, idle = groups_of(policy, 40), []
    for step in range(1, 9):
        began = clock[0]
        work(lambda began=began: clock[0] < began + 10)
        drafter.note_wait(10.0)
        metrics = follow(drafter, step, groups, 50.0, recorded=True)
        idle.append(metrics["time/drafter_idle"])
        assert metrics["drafter/texts_with_states"] > 0, "for the next step's idle time"
        assert metrics["time/drafter_displaced"] <= 2, "what sets libraries up in the first step"
    assert idle[0] == 0 and idle == sorted(idle) and 8 <= idle[-1] <= 10, "as long as nobody needs it"


def test_waits_count_only_where_their_time_is_offered(moved):
    """Where the KV pool has the memory meanwhile, nothing is learned in it, however long it is."""
    policy, head = moved
    for offered in (False, True):
        drafter = online(policy, head, when="auto")
        run_drafter = RunDrafter(drafter, Recorded(), load_config(None, SMALL), warn=print)
        if offered:
            run_drafter.work_in(contextlib.nullcontext)
        for step in range(4):
            run_drafter.observe(step, {}, reward_wait_seconds=60.0)
            drafter.time.look_ahead(used_states=False)
        assert drafter.time.counts_on_idle == offered


def test_a_first_slice_that_outlasts_idle_time_is_no_debt(moved, monkeypatch):
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1, batch=4, budget=0.01)
    let_slices_take(4.0, drafter, monkeypatch)
    examples = [
        Example(text, 1, 0, states_of(drafter, text)) for text in longest_texts(groups_of(policy, 8), 999)
    ]
    drafter.plan("1", examples, 320)
    drafter.time.budget.credit = 0.01
    answers = iter([True, False, False])
    drafter.learn_while(lambda: next(answers))
    assert drafter.time.budget.credit == 0.01 and drafter.time.displaced == 4 and drafter.time.idle == 0


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


def test_idle_time_that_is_shorter_than_a_slice_is_no_way_around_the_budget(moved, monkeypatch):
    """A millisecond of waiting in each step, and slices of two steps' budget, each of which is an update."""
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1, batch=1, lr=1e-3)
    drafter.probation = Probation(proven=True)
    added = seconds_of(drafter, groups_of(policy, 8), monkeypatch, 40, a_slice=2.0, wait=0.001)
    assert drafter.due and 30 < added < 40 + 4, "the first slices set libraries up"


@pytest.mark.parametrize(("copies", "learns"), [(0.5, True), (1.2, True), (3.0, True), (30.0, False)])
def test_where_copies_take_most_of_the_budget_it_learns_less_often_or_rests(
    moved, monkeypatch, copies, learns
):
    """What a step of learning takes besides slices is saved up for, too; more than 8 steps' share is not."""
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1, batch=1)
    drafter.probation = Probation(proven=True)
    added = seconds_of(drafter, groups_of(policy, 4), monkeypatch, 24, a_slice=0.5, copies=copies)
    assert drafter.due == learns and added < 24 + 2 * copies
    assert drafter.average.updates >= 8 or not learns


def test_an_update_that_only_idle_time_has_room_for_is_made_in_it(moved, monkeypatch):
    """Sixteen slices of two seconds, a budget of one second a step, and a minute of waiting in each."""
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1, batch=16)
    drafter.probation = Probation(proven=True)
    seconds_of(drafter, groups_of(policy, 60), monkeypatch, 4, a_slice=2.0, wait=60.0)
    assert drafter.due and drafter.average.updates >= 3


@pytest.mark.parametrize(("judging", "steps"), [(10.0, 30), (20.0, 40)])
def test_what_a_comparison_takes_is_no_reason_to_give_up(moved, monkeypatch, judging, steps):
    """It is made now and then: ten or twenty steps' budget, while an update takes half of one.

    Twenty are more than anything that is made in every step may owe.
    """
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1, batch=1)
    added = seconds_of(drafter, groups_of(policy, 4), monkeypatch, steps, a_slice=0.5, judging=judging)
    assert drafter.due and drafter.average.updates > 8 and judging < added < steps + 1


def test_one_short_step_does_not_end_learning(moved, monkeypatch):
    """An update takes four steps' share; one step has a tenth of the others' length."""
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1, batch=4, budget=0.01)
    drafter.probation = Probation(proven=True)
    let_slices_take(1.0, drafter, monkeypatch)
    groups = groups_of(policy, 40)
    for step in range(1, 13):
        follow(drafter, step, groups, 10.0 if step == 9 else 100.0, recorded=True)
    assert drafter.due


def test_memory_that_is_pinned_once_is_paid_for_but_no_reason_to_give_up(moved, monkeypatch):
    policy, head = moved
    drafter, groups = online(policy, head, when="auto", unroll=1, batch=2), groups_of(policy, 4)
    monkeypatch.setattr(drafter.texts.tap, "take_seconds", lambda: (0.0, 0.35))
    drafter.expect(groups)
    metrics = drafter.follow(1, {}, 3.0)
    assert drafter.due and metrics["time/drafter_displaced"] == pytest.approx(0.35, abs=0.1)
    assert drafter.time.budget.credit == pytest.approx(0.03 - 0.35, abs=0.1)


def test_auto_rests_where_its_budget_is_too_small_for_an_update(moved, monkeypatch):
    """A second a slice and 16 slices an update: 1% of steps of 50 s would take 32 of them, of 250 s 7.

    A slice that sets things up counts for nothing; where it is not so clear, three are timed, whose time is
    saved up for.
    """
    policy, head = moved
    said: list[str] = []
    groups = groups_of(policy, 60)
    config = OnlineDrafterConfig(when="auto", unroll=1, batch=16, budget=0.01)
    for seconds, rests, slices in ((50.0, True, 2), (100.0, True, 5), (250.0, False, 17)):
        said.clear()
        drafter = OnlineDrafter(policy, head, config, seed=0, warn=said.append)
        let_slices_take(1.0, drafter, monkeypatch)
        spent = [
            follow(drafter, step, groups, seconds, recorded=True)["time/drafter_displaced"]
            for step in range(1, 9)
        ]
        assert drafter.due is not rests, (seconds, spent)
        assert sum(spent) == slices if rests else sum(spent) >= slices, spent
        assert len(said) == int(rests) and all("online.budget = 0.01" in line for line in said)
        if rests:
            for share in (0.8, 0.8, 0.5):
                drafter.observe(share, 5000)
            assert drafter.due, "it drifted"
            again = follow(drafter, 9, groups, seconds)
            assert again["time/drafter_displaced"] == 0 and not drafter.due, "what slices take is known"
            assert drafter.learning.rebuilt == 0
    said.clear()
    drafter = OnlineDrafter(policy, head, OnlineDrafterConfig(), seed=0, warn=said.append)
    let_slices_take(1.0, drafter, monkeypatch)
    for step in (1, 2):
        follow(drafter, step, groups, 1.0, recorded=True)
    assert not drafter.due and not said, "nobody asked for it"


def test_what_sets_libraries_up_is_counted_but_is_no_debt(moved, monkeypatch):
    """A second each: the first slice that makes states, the first through the head, one that is owed."""
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1, batch=16, budget=0.01)
    let_slices_take(1.0, drafter, monkeypatch)
    spent = follow(drafter, 1, groups_of(policy, 60), 50.0)["time/drafter_displaced"]
    assert spent == 3
    assert drafter.time.budget.credit == pytest.approx(0.5 - 1)


def test_a_debt_is_paid_off_while_auto_rests(moved):
    policy, head = moved
    drafter, groups = online(policy, head, when="auto", unroll=1, batch=2), groups_of(policy, 1)
    drafter.time.budget.credit = -1e3
    drafter._rest()
    for step in range(1, 9):
        follow(drafter, step, groups, 1e4)
    assert -300 < drafter.time.budget.credit < -100, "1% of 80,000 seconds"


def test_auto_rests_where_a_debt_would_last_for_longer_than_a_trial(moved):
    """One slice that took a thousand times what a step grants, and no idle time since."""
    policy, head = moved
    drafter, groups = online(policy, head, when="auto", unroll=1, batch=2), groups_of(policy, 4)
    follow(drafter, 1, groups, 1.0)
    assert drafter.due
    drafter.time.budget.credit = -10.0
    follow(drafter, 2, groups, 1.0)
    assert not drafter.due and not drafter.auto.learning


def test_auto_asks_for_the_states_that_it_has_time_for(moved, monkeypatch):
    """Of 320 tokens those of one optimiser step, more after it has learned from those; all with `always`."""
    monkeypatch.setattr(step_texts, "SPREAD", 1)
    policy, head = moved
    groups = groups_of(policy, 8)
    drafter = online(policy, head, when="auto", unroll=1, batch=2)

    def asked_for() -> int:
        drafter.expect(groups)
        assert not drafter.texts.tap.wanted or len(drafter.texts.tap.wanted) == len(drafter.texts.chosen)
        return sum(text.loss_tokens for text in drafter.texts.chosen)

    one_step = 2 * drafter.learning.passage_rows
    assert one_step <= asked_for() < one_step + 40
    learned = drafter.follow(1, {}, step_seconds=1e6)["drafter/tokens"]
    assert learned > one_step - 40, "time for all that was planned"
    assert asked_for() == 2 * learned > one_step
    drafter.time.budget.credit = -5e4  # of 1e4 a step
    drafter.follow(2, {}, step_seconds=1e6)
    assert one_step <= asked_for() < one_step + 40, "no time was left"
    assert not drafter.texts.tap.wanted, "and nothing will be learned from them"
    drafter = online(policy, head, when="always", unroll=1, batch=2)
    assert asked_for() == 8 * 40


def test_a_comparison_of_heads_is_paid_from_the_budget(moved, monkeypatch):
    """A clock on which each of two comparisons takes a second."""
    policy, head = moved
    drafter, groups = online(policy, head, when="auto", unroll=1, batch=2), groups_of(policy, 4)
    drafter.probation = Probation(proven=True)
    drafter.observe(0.9, 5000)
    follow(drafter, 1, groups, 1e6)
    drafter.observe(0.5, 5000)
    clock = let_slices_take(0.0, drafter, monkeypatch)
    drafter.judge.quality = lambda head, count, makes_states: clock.__setitem__(0, clock[0] + 1.0) or 0.5
    drafter.due = False
    credit = drafter.time.budget.credit
    assert drafter.publisher.suspect and drafter.needs_memory
    assert follow(drafter, 2, groups, 100.0)["time/drafter_displaced"] == 2
    assert drafter.time.budget.credit == min(credit + 1, 8) - 2


def test_what_the_learner_copies_for_the_head_is_paid_from_the_budget(moved, monkeypatch):
    policy, head = moved
    drafter, groups = online(policy, head, when="auto", unroll=1, batch=2), groups_of(policy, 4)
    drafter.probation = Probation(proven=True)
    let_slices_take(0.0, drafter, monkeypatch)
    drafter.expect(groups)
    text = drafter.texts.chosen[0]
    batch = pack([text], policy.device)
    clock = iter([10.0, 10.5])
    monkeypatch.setattr(state_tap.time, "perf_counter", lambda: next(clock, 10.5))
    policy(batch.tokens_T, batch.attention.positions_T, batch.attention, drafter.texts.tap.watch([text]))
    metrics = drafter.follow(1, {}, 100.0)
    assert metrics["drafter/texts_with_states"] == 1 and metrics["time/drafter_displaced"] == 0.5
    assert drafter.time.budget.credit == 1 - 0.5
    drafter.expect(groups)
    assert drafter.follow(2, {}, 100.0)["time/drafter_displaced"] == 0


def test_where_time_is_short_no_second_pass_is_made_if_an_update_has_its_states(moved):
    """An update is of two passages of 64 tokens, and a quarter of that is enough."""
    policy, head = moved
    groups = groups_of(policy, 8)
    for when, ready, rebuilt in (("auto", 4, 0), ("auto", 1, 0), ("auto", 0, 8), ("always", 4, 4)):
        drafter = online(policy, head, when=when, unroll=1, batch=2, tokens=320)
        drafter._tokens = 320
        drafter.expect(groups)
        states = {text.tokens: states_of(drafter, text) for text in drafter.texts.chosen[:ready]}
        metrics = drafter.follow(1, states, 1e6)
        assert metrics["drafter/rebuilt"] == rebuilt and metrics["drafter/updates"] > 0


def test_idle_work_ends_at_once(moved):
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1, batch=4)
    drafter.plan("1", [Example(text, 1, 0) for text in longest_texts(groups_of(policy, 16), 640)], 640)
    asked = []
    work = drafter.work(lambda: len(asked) >= 2 or asked.append(1) is not None)
    assert drafter.has_work and len(list(work)) == 2, "asked before every slice"


@pytest.mark.parametrize("what", ["the engine's states", "publishing"])
def test_what_a_step_takes_besides_slices_is_paid_from_the_budget(moved, monkeypatch, what):
    """A clock on which it takes half a second of 1% of 100."""
    policy, head = moved
    drafter, groups, recording = (
        online(policy, head, when="auto", unroll=1, batch=2),
        groups_of(policy, 4),
        Recorded(),
    )
    drafter.probation = Probation(proven=True)
    clock = let_slices_take(0.0, drafter, monkeypatch)

    def slow(function):
        def run(*arguments):
            clock[0] += 0.5
            return function(*arguments)

        return run

    if what == "publishing":
        drafter.publisher.publish = slow(drafter.publisher.publish)
    else:
        recording.take_states = slow(recording.take_states)
    run_drafter = RunDrafter(drafter, recording, load_config(None, SMALL), warn=print)
    drafter.expect(groups)
    metrics = run_drafter.follow(1, 100.0)
    assert metrics["drafter/updates"] > 0 and metrics["drafter/version"] == 1
    assert metrics["time/drafter_displaced"] == 0.5 and drafter.time.budget.credit == 1 - 0.5


def test_nothing_is_learned_after_the_run_has_closed_its_head(moved, monkeypatch):
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
