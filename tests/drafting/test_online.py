"""A head that learns while the policy does: how much, that it helps, and that no worse one keeps drafting."""

import itertools
import time

import pytest
import torch

from paceline.drafting.eagle_folder import load_eagle
from paceline.drafting.examples import longest_texts
from paceline.drafting.online import RESTING_STEPS, STRETCH, Learned
from paceline.models.source import BUILTIN_POLICY
from paceline.policy.huggingface import load_policy
from paceline.types import Completion, FinishReason, Group, Request, Sample, SamplingParams, Score
from tests.drafting.online_helpers import accepted, follow, groups_of, online, same


def group(*lengths: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    samples = []
    for number, length in enumerate(lengths):
        request = Request(f"{lengths}/{number}", (1, 2), number, SamplingParams())
        completion = Completion(request, (2,) * length, (0.0,) * length, FinishReason.LENGTH, ())
        samples.append(Sample(completion, Score(rewards[number % len(rewards)], False)))
    return Group(str(lengths), tuple(samples))


def test_longest_texts_are_those_that_the_learner_passes_and_that_have_room():
    mixed, equal = group(300, 5, 200, 0, 100), group(400, 40, rewards=(1.0,))

    def chosen(groups: list[Group], tokens: int, room: int) -> list[int]:
        return [len(text.loss_mask) for text in longest_texts(groups, tokens, room)]

    assert chosen([mixed, equal], 400, 10**6) == [300, 200]
    assert chosen([mixed, equal], 10**6, 10**6) == [300, 200, 100, 5]
    assert chosen([mixed, equal], 10**6, 210) == [200, 5], "with its prompt"
    assert chosen([equal], 1, 10**6) == [400], "else the learner passes all of them"
    assert chosen([mixed], 0, 10**6) == []


def test_head_follows_a_policy_that_moved(moved):
    policy, head = moved
    weights = {name: p.clone() for name, p in policy.named_parameters()}
    drafting = {name: p.clone() for name, p in head.named_parameters()}
    drafter, groups = online(policy, head, rate=4.0), groups_of(policy, 32)
    reports = [follow(drafter, step, groups) for step in range(1, 7)]
    assert all(report["drafter/updates"] == 4 for report in reports)
    assert reports[-1]["drafter/overlap"] > reports[0]["drafter/overlap"] + 0.05, reports
    assert all(torch.equal(p, weights[name]) and p.grad is None for name, p in policy.named_parameters())
    assert all(torch.equal(p, drafting[name]) for name, p in head.named_parameters()), "only by publishing"
    assert same(drafter.drafting.published[-1], drafter.weights())


def clock_of(seconds: float, monkeypatch) -> None:
    """Everything takes so long, by a clock that moves on whenever it is read."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: seconds * next(ticks))


@pytest.mark.parametrize("faster", [1.0, 1000.0])
def test_second_step_fixes_how_many_updates_the_share_pays_for(moved, monkeypatch, faster):
    """The first one sets libraries up; whatever the machine does later changes nothing."""
    policy, head = moved
    groups = groups_of(policy, 32)
    drafter = online(policy, head, rate=None, share=0.25)
    clock_of(50.0, monkeypatch)
    assert follow(drafter, 1, groups)["drafter/updates"] == 1
    clock_of(0.1, monkeypatch)
    metrics = follow(drafter, 2, groups, seconds=1.0)
    assert metrics["drafter/updates"] == 1 and metrics["time/drafter_rate"] == pytest.approx(2.5)
    clock_of(0.1 / faster, monkeypatch)
    updates = [follow(drafter, step, groups, seconds=9.0)["drafter/updates"] for step in range(3, 9)]
    assert updates == [2, 3, 2, 3, 2, 3]


def test_small_share_pays_for_an_update_now_and_then(moved):
    policy, head = moved
    drafter, groups = online(policy, head, rate=0.4), groups_of(policy, 8)
    asked = []
    for step in range(1, 11):
        drafter.expect(groups)
        asked.append(bool(drafter.tap.chosen))
        assert drafter.needs_memory == asked[-1]
        assert follow(drafter, step, groups)["drafter/updates"] == asked[-1]
    assert asked == [False, False, True, False, True] * 2, "states are captured for these steps alone"


@pytest.mark.parametrize("lr, rests", [(1e-12, True), (1e-3, False)])
def test_head_rests_after_updates_that_brought_nothing(moved, lr, rests):
    """A stretch on the same responses, of a head that hardly moves and of one that learns."""
    policy, head = moved
    drafter, groups = online(policy, head, rate=2.0, lr=lr), groups_of(policy, 16)
    for step in range(1, STRETCH // 2 + 1):
        metrics = follow(drafter, step, groups)
    assert metrics["drafter/resting"] == rests
    if rests:
        follow(drafter, step + 1, groups)
        updates = [follow(drafter, step, groups)["drafter/updates"] for step in range(20, 20 + RESTING_STEPS)]
        assert sum(updates) == 1


def test_resting_head_wakes_when_it_no_longer_follows_the_policy(moved):
    policy, head = moved
    drafter, groups = online(policy, head, rate=2.0, lr=1e-12), groups_of(policy, 16)
    for step in range(1, STRETCH // 2 + 2):
        metrics = follow(drafter, step, groups)
    assert metrics["drafter/resting"]
    for step in range(20, 20 + 2 * RESTING_STEPS):
        metrics = follow(drafter, step, groups)
    assert metrics["drafter/resting"], "nothing has changed"
    with torch.no_grad():
        for parameter in drafter.learner.head.parameters():
            parameter.mul_(0.5)
    for step in range(80, 80 + RESTING_STEPS):
        metrics = follow(drafter, step, groups)
    assert not metrics["drafter/resting"]


@pytest.mark.parametrize("lr", [1e30, 1e3])
def test_head_that_is_not_finite_is_never_published(moved, lr):
    policy, head = moved
    said: list[str] = []
    drafter = online(policy, head, said, rate=8.0, lr=lr)
    for step in range(1, 5):
        metrics = follow(drafter, step, groups_of(policy, 32))
    published = drafter.drafting.published
    assert published and all(tensor.isfinite().all() for one in published for tensor in one.values())
    if lr == 1e30:
        assert len(said) == 1 and "online.lr = 1e+30" in said[0]
        assert same(published[-1], {name: p.detach() for name, p in head.named_parameters()})
    assert all(value == value for value in metrics.values())


@pytest.mark.parametrize("earlier, stays", [(2.0, "earlier"), (1.2, "newest")])
def test_worse_head_drafts_for_no_more_than_the_rollout_that_shows_it(moved, earlier, stays):
    """The one before drafts for a rollout of the same policy: a fall may be the policy's own doing."""
    policy, head = moved
    said: list[str] = []
    drafter, groups = online(policy, head, said), groups_of(policy, 8)
    published = drafter.drafting.published
    first = drafter.weights()
    follow(drafter, 1, groups, accepted(2.0))
    newest = published[-1]
    assert not same(newest, first)
    follow(drafter, 2, groups, accepted(1.3))
    assert same(published[-1], first) and same(drafter.weights(), first)
    metrics = follow(drafter, 3, groups, accepted(earlier))
    assert metrics["drafter/updates"] == 0, "what is compared stays as it is"
    assert metrics["drafter/rollbacks"] == len(said) == (stays == "earlier")
    assert same(published[-1], first if stays == "earlier" else newest)
    learned = drafter.learner.trainer.optimiser.steps
    assert learned == (0 if stays == "earlier" else 1), "it continues from that one"
    follow(drafter, 4, groups, accepted(earlier))
    assert not same(published[-1], first) and not drafter.on_trial, "and compares with its acceptance"


def test_head_of_a_policy_that_gets_harder_to_draft_for_rests_all_the_same(moved):
    """Comparing it again and again does not begin what it is judged by anew."""
    policy, head = moved
    drafter, groups = online(policy, head, rate=2.0, lr=1e-12), groups_of(policy, 16)
    compared = 0
    for step in range(1, 4 * STRETCH):
        earlier = drafter.on_trial
        compared += earlier
        metrics = follow(drafter, step, groups, accepted(4.0 * 0.9**step - 0.01 * earlier))
        if metrics["drafter/resting"]:
            break
    assert metrics["drafter/resting"] and 0 < compared < step / 2 and not metrics["drafter/rollbacks"]


@pytest.mark.parametrize("drafts, mean", [(400, 1.9), (5000, 1.99), (5000, 2.4)])
def test_fall_that_chance_explains_is_none(moved, drafts, mean):
    policy, head = moved
    drafter, groups = online(policy, head), groups_of(policy, 8)
    follow(drafter, 1, groups, accepted(2.0, drafts))
    metrics = follow(drafter, 2, groups, accepted(mean, drafts))
    assert metrics["drafter/updates"] == 1 and not drafter.on_trial


def test_head_that_lost_slowly_is_compared_with_the_one_of_before(moved):
    """At the end of a stretch that brought nothing, though no step fell by more than chance."""
    policy, head = moved
    drafter, groups = online(policy, head, rate=2.0, lr=1e-12), groups_of(policy, 16)
    first = drafter.weights()
    for step in range(1, STRETCH // 2 + 1):
        follow(drafter, step, groups, accepted(2.0 - 0.005 * step, 400))
    assert same(drafter.drafting.published[-1], first) and drafter.on_trial
    assert follow(drafter, step + 1, groups, accepted(2.0, 400))["drafter/rollbacks"] == 1


@pytest.mark.parametrize("enough_for", [0, 2])
def test_online_head_without_memory_stops_with_a_warning(moved, monkeypatch, enough_for):
    policy, head = moved
    said: list[str] = []
    drafter = online(policy, head, said, rate=8.0)
    learner = drafter.learner
    before, rows = drafter.weights(), learner.slicing.slice_rows
    learner.slicing.token_budget = 1 << 20  # an update is a slice
    accumulate, calls = learner.trainer.accumulate_rows, []

    def out_of_memory(*arguments):
        accumulate(*arguments)  # gradients are there already
        calls.append(arguments)
        if len(calls) > enough_for:
            raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(learner.trainer, "accumulate_rows", out_of_memory)
    metrics = follow(drafter, 1, groups_of(policy, 32))
    assert metrics["drafter/updates"] == learner.trainer.optimiser.steps == enough_for
    assert learner.slicing.slice_rows == rows // 2 and "no memory" in said[0]
    assert same(drafter.weights(), before) == (enough_for == 0)
    assert all(p.grad is None for p in learner.head.parameters())


# -- resuming ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("moment", ["measuring", "learning", "trial", "resting"])
def test_resumed_head_continues_as_the_one_that_was_not_interrupted(dtype, moment):
    """Also where masters are not the parameters."""
    policy = load_policy(BUILTIN_POLICY, dtype)
    head = load_eagle("builtin-eagle", policy, dtype)
    lr = 1e-12 if moment == "resting" else 1e-2
    rate = None if moment == "measuring" else 8.0 if moment == "resting" else 0.7
    first, second = (online(policy, head, rate=rate, lr=lr) for _ in range(2))
    groups = groups_of(policy, 32 if moment == "resting" else 6)
    steps = [accepted(2.0), accepted(2.0), accepted(1.0), accepted(1.5), accepted(1.6)]
    until = 2 if moment == "resting" else {"measuring": 1, "learning": 2, "trial": 3}[moment]
    for step in range(until):
        follow(first, step + 1, groups, steps[step])
    assert bool(first.on_trial) == (moment in ("trial", "resting"))
    state = {name: tensor.clone() for name, tensor in first.state().items()}
    second.load_state(state)
    assert same(second.state(), state) and same(second.weights(), first.weights())
    if moment != "measuring":
        assert same(second.drafting.published[-1], first.drafting.published[-1]), "what drafts"
    for step in range(until, 5):
        for drafter in (first, second):
            drafter.rate = 0.7  # whatever this machine measures
            follow(drafter, step + 1, groups, steps[step])
        first_state, second_state = first.state(), second.state()
        first_state.pop("online.counter.rate"), second_state.pop("online.counter.rate")
        assert same(first_state, second_state), step
    assert same(first.drafting.published[-1], second.drafting.published[-1])


def test_head_that_learned_nothing_saves_no_weights_and_measures_again_with_another_share(moved):
    policy, head = moved
    drafter = online(policy, head, rate=0.3)
    follow(drafter, 1, groups_of(policy, 4))
    state = drafter.state()
    assert sum(tensor.nbytes for tensor in state.values()) < 1000
    same_share, another = online(policy, head, rate=None), online(policy, head, rate=None, share=0.1)
    for resumed in (same_share, another):
        resumed.load_state(state)
    assert (same_share.rate, same_share.measured, same_share.steps) == (0.3, 2, 1)
    assert (another.rate, another.measured) == (1.0, 0)


def test_checkpoint_without_a_state_resumes_with_the_head_that_drafted(moved):
    policy, head = moved
    drafter = online(policy, head)
    drafted = {f"eagle.{name}": p.detach() + 1 for name, p in head.named_parameters()}
    drafter.load_state({**drafted, "eagle.draft_to_target": head.draft_to_target})
    assert all(torch.equal(tensor, drafted[f"eagle.{name}"]) for name, tensor in drafter.weights().items())
    before = drafter.weights()
    drafter.load_state({})
    assert same(drafter.weights(), before)


# -- in replicas ---------------------------------------------------------------------------------------------


class Replicas:
    """Replicas that learned what the test says."""

    def __init__(self) -> None:
        self.learned: Learned | None = None
        self.calls: list[str] = []

    def begin_rollout(self) -> None:
        self.calls.append("begin")

    def end_rollout(self) -> None:
        self.calls.append("end")

    def take(self, seconds: float) -> Learned | None:
        self.calls.append(f"take {seconds:g}")
        learned, self.learned = self.learned, None
        return learned


def step_of(drafter, replicas: Replicas, step: int, scale: float, mean: float) -> dict[str, float]:
    with drafter.while_generating():
        pass
    weights = {name: tensor * scale for name, tensor in drafter.newest().items()}
    replicas.learned = Learned(weights, [0.5], 3, 100.0, 2, seconds=4.0, waited=0.5)
    return drafter.follow(step, accepted(mean), 10.0)


def test_head_that_learns_in_replicas_follows_the_same_rule(moved):
    policy, head = moved
    said: list[str] = []
    replicas = Replicas()
    drafter = online(policy, head, said, trainers=replicas, rate=0.01)
    assert not drafter.needs_memory and drafter.learner is None
    drafter.expect(groups_of(policy, 4))
    assert not drafter.tap.chosen, "they have states of their own"
    first = drafter.weights()
    metrics = step_of(drafter, replicas, 1, 2.0, mean=2.0)
    assert replicas.calls == ["begin", "end", "take 0.1"]
    assert [metrics[f"drafter/{key}"] for key in ("updates", "trainers")] == [3, 2]
    assert metrics["time/drafter_displaced"] >= 0.5 and metrics["time/drafter_idle"] == 4.0
    assert same(drafter.drafting.published[-1], {name: 2 * tensor for name, tensor in first.items()})
    step_of(drafter, replicas, 2, 2.0, mean=1.0)
    assert same(drafter.drafting.published[-1], first) and drafter.on_trial
    replicas.calls.clear()
    metrics = step_of(drafter, replicas, 3, 2.0, mean=2.0)
    assert not replicas.calls and metrics["drafter/rollbacks"] == 1 and same(drafter.weights(), first)
    step_of(drafter, replicas, 4, float("nan"), mean=2.0)
    assert same(drafter.drafting.published[-1], first) and "not finite" in said[-1]
    for step in range(5, 5 + STRETCH):
        metrics = step_of(drafter, replicas, step, 1.0, mean=2.0)
    assert metrics["drafter/resting"]


@pytest.mark.parametrize("here", [True, False])
def test_head_resumes_where_it_learned_elsewhere_before(moved, here):
    """`cluster.replicas` may change: the weights stay, the optimiser begins anew."""
    policy, head = moved
    replicas = Replicas()
    own, remote = online(policy, head), online(policy, head, trainers=replicas)
    follow(own, 1, groups_of(policy, 8))
    step_of(remote, replicas, 1, 2.0, mean=2.0)
    before, after = (remote, own) if here else (own, remote)
    after.load_state(before.state())
    assert same(after.weights(), before.weights()) and same(after.drafting.published[-1], before.weights())
