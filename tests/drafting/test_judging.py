"""What a head that learns is compared with before it drafts, and what is published of it."""

import copy

import pytest
import torch

from paceline.drafting import judging
from paceline.drafting.examples import Example, longest_texts
from paceline.drafting.online_state import load_online_state, online_state
from paceline.drafting.publishing import (
    FIRST_COMPARED,
    HOPELESS,
    UNANSWERED,
    Probation,
    Published,
    snapshot,
)
from paceline.drafting.when import PATIENCE
from tests.drafting.online_helpers import follow, groups_of, let_slices_take, online, states_of


def test_what_is_published_is_the_mean_of_the_newest_weights(moved):
    policy, head = moved
    drafter, groups = online(policy, head, unroll=1, batch=1), groups_of(policy, 8)
    drafter.probation = Probation(proven=True)
    masters = drafter.trainer.optimiser.masters()
    seen = []
    update = drafter.average.update
    drafter.average.update = lambda now: (seen.append(now["fc.weight"].clone()), update(now))
    follow(drafter, 1, groups)
    assert len(seen) >= 8
    expected = seen[0]
    for count, weight in enumerate(seen[1:], 2):
        expected = expected + (weight - expected) * max(8 / (count + 7), 1 / 32)
    published = drafter.publisher.current.weights["fc.weight"]
    torch.testing.assert_close(published, expected)
    assert not torch.equal(published, masters["fc.weight"]), "from which training goes on"
    kept = dict(drafter.head_to_keep().named_parameters())
    assert torch.equal(kept["fc.weight"], published), "and what a folder gets"
    drafter.take_head(drafter.publisher.current.weights, 2)
    assert drafter.average.updates == 0
    assert torch.equal(drafter.average.mean["fc.weight"], masters["fc.weight"]), "a new start"


def test_a_head_drafts_when_it_is_as_good_as_the_one_that_does(moved):
    """Compared after 4 updates and, as it is worse, after 8; in a run that goes on from its state, too."""
    policy, head = moved
    start = {name: p.detach().clone() for name, p in head.named_parameters()}
    groups = groups_of(policy, 1)
    first = online(policy, head, unroll=1, batch=32)
    first.judge.quality = iter_quality(0.6, 0.7)
    for step in range(1, 9):
        assert follow(first, step, groups)["drafter/updates"] == 1
        assert not first.probation.proven and first.publisher.current.version == 0
        assert (first.probation.next_at == FIRST_COMPARED) == (step <= FIRST_COMPARED)
        assert all(torch.equal(weight, start[name]) for name, weight in first.weights().items())
    second = online(policy, copy.deepcopy(head), unroll=1, batch=32)
    second.head.fc.weight.data.zero_()
    load_online_state(second, {name: tensor.clone() for name, tensor in online_state(first).items()})
    assert second.probation == first.probation == Probation(False, 8)
    for name, weight in second.publisher.current.weights.items():
        assert torch.equal(weight, start[name]), name
    for drafter in (first, second):
        drafter.judge.quality = iter_quality(0.7, 0.7)
        for step in (9, 10):
            follow(drafter, step, groups)
            assert drafter.probation.proven and drafter.publisher.current.version == step, "compared once"
    assert not torch.equal(first.publisher.current.weights["fc.weight"], start["fc.weight"])
    for name, weight in second.publisher.current.weights.items():
        assert torch.equal(weight, first.publisher.current.weights[name]), name


def test_a_head_that_is_found_good_drafts_at_once(moved, monkeypatch):
    """Although there is no time for another update in that step, nor in the next ones."""
    policy, head = moved
    drafter, groups = online(policy, head, when="auto", unroll=1, batch=32), groups_of(policy, 1)
    let_slices_take(1.0, drafter, monkeypatch)
    drafter.judge.quality = iter_quality(0.8, 0.7)
    for step in range(1, FIRST_COMPARED + 1):
        assert follow(drafter, step, groups, 1000.0)["drafter/updates"] == 1
    assert drafter.publisher.current.version == 0
    drafter.time.budget.credit = -100.0
    metrics = follow(drafter, 5, groups, 1000.0)
    assert metrics["drafter/updates"] == 0 and drafter.publisher.current.version == 5
    drafter.judge.quality = iter_quality()
    assert follow(drafter, 6, groups, 1000.0)["drafter/version"] == 5, "nothing new to publish"


def test_heads_are_compared_along_texts_that_they_have_not_learned_from(moved):
    """Those of the step at hand, before it is learned from; without states nothing is known."""
    policy, head = moved
    drafter = online(policy, head, unroll=1, batch=32)
    seen = []
    quality = drafter.judge.quality
    drafter.judge.quality = lambda head, count, makes_states: (
        seen.append((max(e.step for e in drafter.buffer), drafter.average.updates)),
        quality(head, count),
    )[1]
    for step in range(1, 6):
        follow(drafter, step, groups_of(policy, 1))
    assert seen == [(5, 4)] * 2
    for example in drafter.buffer:
        example.states = None
    assert drafter._judge(drafter.average.mean) is None
    unknown = Probation()
    assert not unknown.passes(4, {}, {}, lambda weights: None), "nothing tells"
    assert unknown.is_due(5) and unknown == Probation(unanswered=1), "asked again"


def test_a_head_that_rests_is_judged_along_texts_that_it_has_not_learned_from(moved, monkeypatch):
    """`auto` rests by what its updates bring in a step; what it had published drafts in the next one."""
    policy, head = moved
    drafter, groups = online(policy, head, when="auto", unroll=1, batch=4), groups_of(policy, 4)
    drafter.probation = Probation(proven=True)
    drafter.observe(0.9, 5000)
    drafter.auto.note_update = lambda overlap: drafter.auto.rest()
    follow(drafter, 1, groups, 1e6, recorded=True)
    assert not drafter.due and drafter.publisher.current.version == 1
    drafter.expect(groups)
    assert drafter.texts.tap.wanted, "nobody knows yet how the new head does"
    drafter.observe(0.5, 5000)
    judged = []
    drafter._judge = lambda weights: judged.append({e.step for e in drafter.buffer if e.states}) or 0.5
    drafter.follow(2, {text.tokens: states_of(drafter, text) for text in drafter.texts.chosen}, 1e6)
    assert judged and all(max(steps) == 2 for steps in judged)
    drafter.expect(groups)
    assert not drafter.texts.tap.wanted, "it is settled"


def test_nothing_is_told_by_a_step_whose_texts_have_no_states(moved):
    """Those of the step before have some: the head has learned from them."""
    policy, head = moved
    drafter = online(policy, head, unroll=1, batch=4)
    texts = longest_texts(groups_of(policy, 4), 160)
    drafter.buffer.add(1, [Example(text, 1, 0, states_of(drafter, text)) for text in texts[:2]])
    assert drafter.judge.quality(drafter.head) is not None
    drafter.buffer.add(2, [Example(text, 2, 1) for text in texts[2:]])
    assert drafter.judge.quality(drafter.head) is None


def test_always_makes_the_states_that_nobody_left_for_a_comparison(moved):
    """Else such a head would learn for ever, and never draft."""
    policy, head = moved
    drafter = online(policy, head, when="always", unroll=1, batch=2)
    for step in range(1, 2 * UNANSWERED):
        follow(drafter, step, groups_of(policy, 4))
    assert not drafter.probation.unanswered and drafter.probation.next_at > FIRST_COMPARED
    drafter.publisher.unanswered = UNANSWERED - 1  # and for one that drafts, and may have got worse
    drafter.buffer.add(9, [Example(text, 9, 8) for text in longest_texts(groups_of(policy, 4), 160)])
    assert drafter._judge(snapshot(head)) is not None
    limited = online(policy, head, when="auto", unroll=1, budget=0.9)
    limited.average.updates, limited.probation.unanswered = HOPELESS, UNANSWERED
    limited.buffer.add(1, [Example(text, 1, 0) for text in longest_texts(groups_of(policy, 4), 160)])
    assert limited._judge(snapshot(head)) is None, "a pass of the policy is not what a budget is for"


def test_states_for_a_comparison_are_those_of_as_few_texts_as_will_do(moved):
    policy, head = moved
    judge = online(policy, head, when="always", unroll=1).judge
    texts = [Example(text, 1, 0) for text in longest_texts(groups_of(policy, 4), 160)]
    assert len(texts) == 4 and judge._with_passages(texts, 2) == texts[:2]


def test_without_memory_for_a_comparison_less_is_used_for_the_next(moved, monkeypatch):
    """Else nothing would ever tell, and each step would try in vain."""
    policy, head = moved
    drafter = online(policy, head, when="always", unroll=1)
    drafter.buffer.add(1, [Example(text, 1, 0) for text in longest_texts(groups_of(policy, 4), 160)])
    drafter.probation.unanswered = UNANSWERED
    budget = drafter.learning.token_budget

    def out_of_memory(texts) -> None:
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(drafter.learning, "compute_states", out_of_memory)
    assert drafter._judge(snapshot(head)) is None and drafter.learning.token_budget == budget // 2
    drafter.probation.unanswered = 0
    assert drafter._judge(snapshot(head)) is None and drafter.learning.token_budget == budget // 2


def test_a_head_that_nothing_tells_of_is_asked_about_again_and_then_given_up(moved):
    """Not at once: what tells may only be missing in this step."""
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1, batch=4)
    drafter.average.updates = HOPELESS
    drafter._judge = lambda weights: None
    for step in range(1, UNANSWERED + 1):
        assert drafter.due
        drafter._learn_in_turn = lambda step: None
        follow(drafter, step, groups_of(policy, 4), 1e6)
    assert not drafter.due
    publisher = drafter.publisher
    publisher.before, publisher.suspect = Published(1, dict(publisher.current.weights)), True
    for _ in range(UNANSWERED):
        assert publisher.watches and not publisher.settle(5, lambda weights: None)
    assert not publisher.watches and publisher.before is None


@pytest.mark.parametrize("updates_a_step", [1, 3, 5, 6, 7, 16])
def test_no_head_is_given_up_unseen(updates_a_step):
    """A head that is as good after as many updates as are tried is found so, however many a step makes."""
    probation, updates = Probation(), 0
    while not probation.is_hopeless(updates):
        updates += updates_a_step
        quality = {"ours": float(updates >= HOPELESS), "theirs": 0.5}
        if probation.passes(
            updates, {"ours": 0}, {"theirs": 0}, lambda weights: quality[next(iter(weights))]
        ):
            return
    raise AssertionError(f"given up after {updates} updates, next look at {probation.next_at}")


def test_without_memory_heads_are_not_compared(moved, monkeypatch):
    policy, head = moved
    drafter, groups = online(policy, head, unroll=1, batch=32), groups_of(policy, 1)

    def no_memory(*arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(judging, "compare_rows", no_memory)
    for step in range(1, 7):
        follow(drafter, step, groups)
    assert not drafter.probation.proven and drafter.publisher.current.version == 0
    masters = drafter.trainer.optimiser.masters()
    assert all(torch.equal(p, masters[name]) for name, p in drafter.head.named_parameters())


def test_drift_counts_the_steps_after_which_a_head_was_published(moved):
    """Good enough after 8 updates, one a step: what they brought back shows in the rollouts after that."""
    policy, head = moved
    drafter, groups = online(policy, head, when="drift", unroll=1, batch=32), groups_of(policy, 1)
    drafter.judge.quality = iter_quality(0.6, 0.7, 0.7, 0.7)
    drafter.observe(0.9, 5000)
    follow(drafter, 0, groups)
    versions = []
    for step in range(1, 9 + PATIENCE):
        drafter.observe(0.5, 5000)
        assert drafter.due, step
        versions.append(follow(drafter, step, groups)["drafter/version"])
    assert versions == [0] * 8 + list(range(9, 9 + PATIENCE))
    drafter.observe(0.5, 5000)
    assert not drafter.due, "the policy's own doing"


def test_a_drift_that_ends_unproven_leaves_no_trace(moved):
    policy, head = moved
    drafter, groups = online(policy, head, when="drift", unroll=1, batch=32), groups_of(policy, 1)
    for step, share in enumerate((0.9, 0.5, 0.5, 0.9, 0.9)):
        drafter.observe(share, 5000)
        follow(drafter, step, groups)
    assert drafter.average.updates == 0 and drafter.probation == Probation()
    assert all(torch.equal(p, head.get_parameter(name)) for name, p in drafter.head.named_parameters())


def iter_quality(*values: float):
    """Returns a `quality` that gives these answers, and no more."""
    answers = iter(values)
    return lambda head, count, makes_states: next(answers)


def test_a_comparison_looks_at_both_heads_and_changes_neither(moved):
    policy, head = moved
    drafter, groups = online(policy, head, unroll=1, batch=32), groups_of(policy, 4)
    follow(drafter, 1, groups)
    before = {name: p.detach().clone() for name, p in drafter.head.named_parameters()}
    ruined = {name: torch.zeros_like(p) for name, p in before.items()}
    assert drafter._judge(before) == drafter.judge.quality(drafter.head) > drafter._judge(ruined) + 0.2
    assert all(torch.equal(p, before[name]) for name, p in drafter.head.named_parameters())
    masters = drafter.trainer.optimiser.masters()
    assert all(torch.equal(masters[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("when", ["auto", "drift", pytest.param("always", marks=pytest.mark.slow)])
def test_a_head_that_only_becomes_worse_is_given_up(moved, when):
    """It goes on from what drafts, and rests until that has drifted; `always` goes on."""
    policy, head = moved
    groups = groups_of(policy, 1)
    drafter = online(policy, head, when=when, unroll=1, batch=32)
    drafter.due = True  # with `drift` as after a fall
    drafter._judge = lambda weights: float(weights is drafter.publisher.current.weights)
    updates = sum(follow(drafter, step, groups, 1e6)["drafter/updates"] for step in range(1, 20))
    assert updates == (19 if when == "always" else HOPELESS)
    assert drafter.publisher.current.version == 0 and drafter.due == (when == "always")
    if when != "always":
        assert all(torch.equal(p, head.get_parameter(n)) for n, p in drafter.head.named_parameters())
        for share in (0.8, 0.8, 0.5):
            drafter.observe(share, 5000)
        assert drafter.due and drafter.probation == Probation()


@pytest.mark.parametrize(("ours", "drafts"), [(0.7, True), (0.6999, False)])
def test_as_good_is_not_a_little_worse(ours, drafts):
    qualities = {"ours": ours, "theirs": 0.7}
    quality = lambda weights: qualities[next(iter(weights))]  # noqa: E731
    assert Probation().passes(FIRST_COMPARED, {"ours": 0}, {"theirs": 0}, quality) is drafts
