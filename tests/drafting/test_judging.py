"""What a head that learns is compared with before it drafts, and what is published of it."""

import copy

import pytest
import torch

from paceline.drafting import judging
from paceline.drafting.online_state import load_online_state, online_state
from paceline.drafting.publishing import (
    FIRST_COMPARED,
    HOPELESS,
    Probation,
)
from tests.drafting.online_helpers import follow, groups_of, online


def test_head_drafts_when_it_is_as_good_as_the_one_that_does(moved):
    """Compared after 4 updates and, as it is worse, after 8; in a run that resumes from its state, too."""
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


@pytest.mark.parametrize("updates_a_step", [1, 3, 5, 6, 7, 16])
def test_probation_gives_no_head_up_without_a_comparison(updates_a_step):
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


def test_heads_are_not_compared_without_memory(moved, monkeypatch):
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


def iter_quality(*values: float):
    """Returns a `quality` that gives these answers, and no more."""
    answers = iter(values)
    return lambda head, count, makes_states: next(answers)


def test_comparison_judges_both_heads_and_changes_neither(moved):
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
def test_head_that_only_becomes_worse_is_given_up(moved, when):
    """Learning restarts from what drafts, and rests until that has drifted; `always` continues."""
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
def test_probation_rejects_a_slightly_worse_head(ours, drafts):
    qualities = {"ours": ours, "theirs": 0.7}
    quality = lambda weights: qualities[next(iter(weights))]  # noqa: E731
    assert Probation().passes(FIRST_COMPARED, {"ours": 0}, {"theirs": 0}, quality) is drafts
