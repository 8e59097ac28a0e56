"""A head that learns while the policy does: that it helps, what it learns from, what it needs to resume."""

import math

import pytest
import torch

from paceline.config import OnlineDrafterConfig, load_config
from paceline.drafting.examples import longest_texts
from paceline.drafting.online import OnlineDrafter
from paceline.drafting.publishing import Probation
from paceline.drafting.run_drafter import RunDrafter
from paceline.policy.states import TextStates
from paceline.stats import DraftStats
from paceline.types import Completion, FinishReason, Group, Request, Sample, SamplingParams, Score
from tests.drafting.online_helpers import SMALL, Recorded, follow, groups_of, online, states_of


def test_longest_texts_chooses_the_longest_and_reads_few():
    lengths = [300, 5, 200, 0, 100]
    requests = [Request(str(i), (1, 2), i, SamplingParams()) for i in range(len(lengths))]
    completions = [
        Completion(r, (2,) * n, (0.0,) * n, FinishReason.LENGTH, ())
        for r, n in zip(requests, lengths, strict=True)
    ]
    groups = [Group("a", tuple(Sample(completion, Score(0.0, False)) for completion in completions))]
    assert [len(text.loss_mask) for text in longest_texts(groups, 400)] == [300, 200]
    assert [len(text.loss_mask) for text in longest_texts(groups, 1)] == [300]
    assert [len(text.loss_mask) for text in longest_texts(groups, 10**6)] == [300, 200, 100, 5]


@pytest.mark.slow
def test_head_follows_a_policy_that_moved(moved):
    policy, head = moved
    weights = {name: p.clone() for name, p in policy.named_parameters()}
    drafting = {name: p.clone() for name, p in head.named_parameters()}
    drafter, groups = online(policy, head, lr=1e-3, unroll=2, batch=8), groups_of(policy, 32)
    reports = [follow(drafter, step, groups) for step in range(1, 9)]
    assert reports[0]["drafter/updates"] == 4 and reports[1]["drafter/updates"] == 8, (
        "this step's responses, then also the last one's"
    )
    assert reports[-1]["drafter/overlap"] > reports[0]["drafter/overlap"] + 0.05, reports
    assert reports[-1]["drafter/kl"] < 0.7 * reports[0]["drafter/kl"]
    assert all(torch.equal(p, weights[name]) and p.grad is None for name, p in policy.named_parameters())
    assert all(torch.equal(p, drafting[name]) for name, p in head.named_parameters()), "only by publishing"


def test_drift_decides_when_the_head_learns(moved):
    policy, head = moved
    drafter, groups = online(policy, head, when="drift", unroll=1), groups_of(policy, 4)
    updates = []
    for step, (accepted, drafts) in enumerate(((0.9, 5000), (0.8, 5000), (0.0, 0), (0.9, 5000), (0.9, 5000))):
        drafter.observe(accepted, drafts)
        updates.append(follow(drafter, step, groups)["drafter/updates"])
    assert updates == [0, 1, 1, 0, 0], "as the last rollout in which it drafted said"


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "rests"), [(1e-12, True), (1e-3, False)])
def test_auto_decides_by_what_its_updates_bring(moved, lr, rests):
    """Thirty-two updates on the same responses, of a head that hardly moves and of one that learns."""
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=2, batch=2, lr=lr)
    drafter.probation = Probation(proven=True)
    groups = groups_of(policy, 40)
    for step in range(1, 33):
        follow(drafter, step, groups, 1e6, recorded=True)
        if not drafter.due or drafter.average.updates >= 32:
            break
    assert drafter.due is not rests
    assert drafter.average.updates in ((16, 24) if rests else range(32, 99))


def test_states_of_part_of_a_response_are_not_used_for_all_of_it(moved):
    """A response that continued after an update was a prompt and a shorter response to the engine."""
    policy, head = moved
    groups = groups_of(policy, 2)
    texts = longest_texts(groups, 10**6)
    size, layers = policy.config.hidden_size, len(head.config.captured_layers)
    part = {
        text.tokens: TextStates(torch.zeros(5, size), (torch.zeros(len(text.tokens), size),) * layers)
        for text in texts
    }
    drafter = online(policy, head, unroll=1, batch=2)
    drafter.expect(groups)
    metrics = drafter.follow(1, part)
    assert metrics["drafter/texts"] == metrics["drafter/rebuilt"] == 2
    assert metrics["drafter/texts_with_states"] == 0 and metrics["drafter/updates"] == 1


@pytest.mark.parametrize(
    "overrides, known",
    [
        (["shape=chain", "pacing=fixed", "tokens=3"], (0.9, 0.5, 0.2)),
        (["shape=tree", "pacing=fixed", "tokens=3"], ()),
        (["shape=chain", "pacing=adaptive"], ()),
    ],
)
def test_model_card_has_acceptance_by_place_only_of_chains(moved, overrides, known):
    """Trees, and rows that share, count by number of the node."""
    policy, head = moved
    config = load_config(None, [*SMALL, *(f"rollout.speculation.{key}" for key in overrides)])
    run_drafter = RunDrafter(online(policy, head), Recorded(), config, warn=print)
    measured = run_drafter._measured(1, DraftStats(10, 30, 16, [9, 5, 2], 10))
    assert measured.accepted_at == known and measured.first_accepted == 0.9


@pytest.mark.parametrize("enough_for", [0, 2])
def test_online_head_without_memory_stops_with_a_warning(moved, monkeypatch, enough_for):
    policy, head = moved
    said: list[str] = []
    drafter = OnlineDrafter(
        policy, head, OnlineDrafterConfig(when="always", unroll=1, batch=1), seed=0, warn=said.append
    )
    before, rows = (
        {name: p.clone() for name, p in drafter.head.named_parameters()},
        drafter.learning.slice_rows,
    )
    accumulate, calls = drafter.trainer.accumulate_rows, []

    def out_of_memory(*arguments):
        accumulate(*arguments)  # gradients are there already
        calls.append(arguments)
        if len(calls) > enough_for:
            raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(drafter.trainer, "accumulate_rows", out_of_memory)
    metrics = follow(drafter, 1, groups_of(policy, 8))
    assert metrics["drafter/updates"] == drafter.trainer.optimiser.steps == enough_for
    assert drafter.learning.slice_rows == rows // 2 and "no memory" in said[0]
    assert all(
        torch.equal(p, before[name]) == (enough_for == 0) and p.grad is None
        for name, p in drafter.head.named_parameters()
        if p.ndim > 1
    )


def test_head_with_non_finite_gradients_continues_from_what_drafts(moved):
    """Once said; nothing of it is counted, published or kept."""
    policy, head = moved
    said: list[str] = []
    config = OnlineDrafterConfig(when="always", unroll=1, batch=1, lr=1e30)
    drafter = OnlineDrafter(policy, head, config, seed=0, warn=said.append)
    for step in (1, 2):
        metrics = follow(drafter, step, groups_of(policy, 8))
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["drafter/updates"] < 8
    assert len(said) == 1 and "online.lr = 1e+30" in said[0]
    drafting = drafter.publisher.current.weights
    assert all(torch.isfinite(tensor).all() for tensor in drafting.values())


def test_empty_buffer_is_warned_about_once(moved):
    policy, head = moved
    said: list[str] = []
    config = OnlineDrafterConfig(when="always", buffer_gb=1e-12)
    drafter = OnlineDrafter(policy, head, config, seed=0, warn=said.append)
    for step in (1, 2):
        follow(drafter, step, groups_of(policy, 2))
    assert len(said) == 1 and "online.buffer_gb = 1e-12" in said[0]


def test_engine_states_of_texts_that_the_learner_skipped_are_learned_from(moved):
    """All of a group's rewards are the same: the learner makes no pass over it, and no other pass is made."""
    policy, head = moved
    groups, recording = groups_of(policy, 4), Recorded()
    drafter = online(policy, head, unroll=1, batch=2)
    texts = longest_texts(groups, 10**6)
    recording.take_states = lambda: {text.tokens: states_of(drafter, text) for text in texts}
    run_drafter = RunDrafter(drafter, recording, load_config(None, SMALL), warn=print)
    drafter.expect(groups)
    metrics = run_drafter.follow(1, 10.0)
    assert metrics["drafter/texts_with_states"] == 4 and metrics["drafter/rebuilt"] == 0
    assert metrics["drafter/updates"] == 2


def test_learning_continues_from_the_better_head_after_a_rollback(moved):
    """Neither the mean of the worse head's weights nor its optimiser's moments reach the next version."""
    policy, head = moved
    groups = groups_of(policy, 4)
    drafter = online(policy, head, unroll=1, batch=4, lr=1e-2)
    drafter.probation = Probation(proven=True)
    drafter.observe(0.9, 5000)
    for step in (1, 2):
        follow(drafter, step, groups)
    drafter.observe(0.5, 5000)
    assert drafter.publisher.suspect
    before = drafter.publisher.before.weights
    drafter._judge = lambda weights: float(weights is before)
    assert follow(drafter, 3, groups)["drafter/rollbacks"] == 1
    for name, mean in drafter.average.mean.items():
        assert torch.equal(mean, before[name]), name
        assert torch.equal(drafter.head.get_parameter(name), before[name]), name
    assert drafter.average.updates == drafter.trainer.optimiser.steps == 0
    assert not drafter.probation.proven, "it has to show again that it became no worse"
