"""A head that learns while the policy does: that it helps, in whose time, and that nothing else changes."""

import copy
import functools
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.config import ConfigError, OnlineDrafterConfig, load_config
from paceline.drafting import judging, state_tap
from paceline.drafting import online as online_module
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_folder import load_eagle, save_eagle
from paceline.drafting.examples import TOKEN_BYTES, Example, longest_texts
from paceline.drafting.model_card import MeasuredAcceptance, write_card
from paceline.drafting.online import OnlineDrafter
from paceline.drafting.online_state import load_early_state, load_online_state, online_state
from paceline.drafting.publishing import FIRST_COMPARED, HOPELESS, Probation
from paceline.drafting.run_drafter import RunDrafter
from paceline.drafting.when import PATIENCE
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.reference import ReferenceBackend
from paceline.learning.batch import pack
from paceline.learning.sentinel import Sentinel
from paceline.loop import train
from paceline.models.source import BUILTIN_POLICY
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.huggingface import load_policy
from paceline.policy.states import TextStates
from paceline.report.console import Console
from paceline.session import Session
from paceline.stats import DraftStats
from paceline.types import Completion, FinishReason, Group, Request, Sample, SamplingParams, Score
from tests.loop_helpers import comparable_metrics

SMALL = [
    "run.device=cpu",
    "run.threads=1",
    "task.train_problems=8",
    "task.eval_problems=4",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=48",
    "eval.max_tokens=48",
    "eval.every=0",
    "rollout.speculation.drafters=[eagle]",
    "rollout.speculation.pacing=fixed",
    "rollout.speculation.tokens=3",
]


# -- that it helps -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moved():
    """The built-in policy and its head, and the policy after updates that the head knows nothing of."""
    policy = load_policy(BUILTIN_POLICY, torch.float32)
    head = load_eagle("builtin-eagle", policy, torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.named_parameters():
        if parameter.ndim > 1 and "embedding" not in name:
            parameter.data += 0.15 * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
    return policy, head


def groups_of(policy, count: int) -> list[Group]:
    """Responses that the policy itself wrote; nobody changes it, so it writes them once."""
    return [
        Group("sums", tuple(Sample(completion, Score(0.0, False)) for completion in written(policy, count)))
    ]


@functools.cache
def written(policy, count: int) -> list[Completion]:
    prompts = [(3 + i % 5, 9, 4, 8, 5, 7) for i in range(count)]
    requests = [
        Request(str(i), prompt, 1000 + i, SamplingParams(max_tokens=40, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]
    backend = ReferenceBackend(policy)
    backend.submit(requests)
    with torch.inference_mode():
        return list(backend.completions())


def online(policy, head, when: str = "always", **settings) -> OnlineDrafter:
    return OnlineDrafter(
        policy, head, OnlineDrafterConfig(when=when, **settings), seed=0, warn=lambda message: None
    )


def follow(
    drafter: OnlineDrafter, step: int, groups: list[Group], seconds: float = 0.0, recorded: bool = False
) -> dict[str, float]:
    drafter.expect(groups)
    states = {text.tokens: states_of(drafter, text) for text in drafter._texts} if recorded else {}
    return drafter.follow(step, states, seconds)


def test_the_longest_responses_are_chosen_and_most_are_not_looked_at():
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
def test_the_head_follows_a_policy_that_moved(moved):
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


def test_drift_decides(moved):
    policy, head = moved
    drafter, groups = online(policy, head, when="drift", unroll=1), groups_of(policy, 4)
    updates = []
    for step, (accepted, drafts) in enumerate(((0.9, 5000), (0.8, 5000), (0.0, 0), (0.9, 5000), (0.9, 5000))):
        drafter.observe(accepted, drafts)
        updates.append(follow(drafter, step, groups)["drafter/updates"])
    assert updates == [0, 1, 1, 0, 0], "as the last rollout in which it drafted said"


def let_slices_take(seconds: float | Callable[[], float], drafter: OnlineDrafter, monkeypatch) -> list[float]:
    """Replaces the clock by one that only slices move on; returns what it shows."""
    clock = [0.0]

    def slow(function):
        def run(*arguments) -> None:
            function(*arguments)
            clock[0] += seconds() if callable(seconds) else seconds

        return run

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    drafter.trainer.accumulate_rows = slow(drafter.trainer.accumulate_rows)
    drafter.learning._compute_states = slow(drafter.learning._compute_states)
    return clock


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
        asked.append(bool(drafter.tap.wanted))
        assert drafter.wants_states == asked[-1] or not drafter._passed_over
        needs_memory = drafter.needs_memory
        drafter.observe(0.9, 5000)
        states = {text.tokens: states_of(drafter, text) for text in drafter._texts} if asked[-1] else {}
        metrics = drafter.follow(step, states, 50.0)
        learned.append(metrics["time/drafter_displaced"] > 0)
        assert needs_memory == learned[-1] or step == 1
    assert 3 <= sum(learned) <= 6, learned
    after_learning = [False, *learned[:-1]]
    assert asked == [True] + [a or b for a, b in zip(learned[1:], after_learning[1:], strict=True)]


def test_auto_that_rests_lets_go_of_what_it_had_planned(moved):
    policy, head = moved
    drafter, groups = online(policy, head, when="auto", unroll=1, batch=4), groups_of(policy, 8)
    drafter.expect(groups)
    drafter.buffer.add(1, [Example(text, 1, 0, states_of(drafter, text)) for text in drafter._texts])
    drafter.plan("1", drafter.buffer.examples, 320)
    next(drafter.slices(lambda: False, idle=True))
    assert drafter.learning.work and drafter.trainer.accumulated
    drafter.auto.rest()  # as after an update that was no better than those before
    drafter.observe(0.9, 5000)
    follow(drafter, 2, groups, 1e6)
    assert not drafter.learning.work and not drafter.trainer.accumulated and not drafter.due


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


def test_what_sets_libraries_up_is_counted_but_is_no_debt(moved, monkeypatch):
    """A second each: the first slice that makes states, the first through the head, one that is owed."""
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1, batch=16, budget=0.01)
    let_slices_take(1.0, drafter, monkeypatch)
    spent = follow(drafter, 1, groups_of(policy, 60), 50.0)["time/drafter_displaced"]
    assert spent == 3
    assert drafter.budget.credit == pytest.approx(0.5 - 1)


def test_states_are_kept_of_more_texts_than_are_learned_from(moved):
    """Twice as many tokens, if the buffer holds those of two steps; passages come from all of them."""
    policy, head = moved
    groups = groups_of(policy, 8)
    token_bytes = TOKEN_BYTES + 4 * policy.config.hidden_size * (len(head.config.captured_layers) + 1)
    for room, texts in ((1000, 4), (140, 3), (95, 2), (10, 2)):  # of 46 tokens with their prompts
        own = online(policy, head, unroll=1, batch=1, tokens=80, buffer_gb=2 * room * token_bytes / 1e9)
        own.expect(groups)
        assert len(own._texts) == texts
    drafter = online(policy, head, unroll=1, batch=1, tokens=80)
    planned = []
    drafter.learning.plan = lambda chosen: planned.extend(chosen)
    for step in range(1, 9):
        drafter.expect(groups)
        states = {text.tokens: states_of(drafter, text) for text in drafter._texts}
        drafter.follow(step, states)
    assert len({passage.example.sequence.tokens for passage in planned}) > 2, "not the longest ones alone"


def states_of(drafter: OnlineDrafter, text) -> TextStates:
    hidden = drafter.policy.config.hidden_size
    layers = len(drafter.head.config.captured_layers)
    return TextStates(
        torch.zeros(len(text.loss_mask), hidden), (torch.zeros(len(text.tokens), hidden),) * layers
    )


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
    drafter.budget.credit = -100.0
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
    drafter.judge.quality = lambda head, count: (
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
    assert not unknown.passes(4, {}, {}, lambda weights: None) and unknown == Probation(), "asked again"


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


def test_a_debt_is_paid_off_while_auto_rests(moved):
    policy, head = moved
    drafter, groups = online(policy, head, when="auto", unroll=1, batch=2), groups_of(policy, 1)
    drafter.budget.credit = -1e3
    drafter._rest()
    for step in range(1, 9):
        follow(drafter, step, groups, 1e4)
    assert -300 < drafter.budget.credit < -100, "1% of 80,000 seconds"


def iter_quality(*values: float):
    """Returns a `quality` that gives these answers, and no more."""
    answers = iter(values)
    return lambda head, count: next(answers)


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


def test_auto_rests_where_a_debt_would_last_for_longer_than_a_trial(moved):
    """One slice that took a thousand times what a step grants, and no idle time since."""
    policy, head = moved
    drafter, groups = online(policy, head, when="auto", unroll=1, batch=2), groups_of(policy, 4)
    follow(drafter, 1, groups, 1.0)
    assert drafter.due
    drafter.budget.credit = -10.0
    follow(drafter, 2, groups, 1.0)
    assert not drafter.due and not drafter.auto.learning


def test_auto_asks_for_the_states_that_it_has_time_for(moved, monkeypatch):
    """Of 320 tokens those of one optimiser step, more after it has learned from those; all with `always`."""
    monkeypatch.setattr(online_module, "SPREAD", 1)
    policy, head = moved
    groups = groups_of(policy, 8)
    drafter = online(policy, head, when="auto", unroll=1, batch=2)

    def asked_for() -> int:
        drafter.expect(groups)
        wanted = [text for text in drafter._texts if text.tokens in drafter.tap.wanted]
        return sum(text.loss_tokens for text in wanted)

    one_step = 2 * drafter.learning.passage_rows
    assert one_step <= asked_for() < one_step + 40
    learned = drafter.follow(1, {}, step_seconds=1e6)["drafter/tokens"]
    assert learned > one_step - 40, "time for all that was planned"
    assert asked_for() == 2 * learned > one_step
    drafter.budget.credit = -5e4  # of 1e4 a step
    drafter.follow(2, {}, step_seconds=1e6)
    assert one_step <= asked_for() < one_step + 40, "no time was left"
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
    drafter.judge.quality = lambda head, count: clock.__setitem__(0, clock[0] + 1.0) or 0.5
    drafter.due = False
    credit = drafter.budget.credit
    assert drafter.publisher.suspect and drafter.needs_memory
    assert follow(drafter, 2, groups, 100.0)["time/drafter_displaced"] == 2
    assert drafter.budget.credit == min(credit + 1, 8) - 2


def test_what_the_learner_copies_for_the_head_is_paid_from_the_budget(moved, monkeypatch):
    policy, head = moved
    drafter, groups = online(policy, head, when="auto", unroll=1, batch=2), groups_of(policy, 4)
    drafter.probation = Probation(proven=True)
    let_slices_take(0.0, drafter, monkeypatch)
    drafter.expect(groups)
    text = drafter._texts[0]
    batch = pack([text], policy.device)
    clock = iter([10.0, 10.5])
    monkeypatch.setattr(state_tap.time, "perf_counter", lambda: next(clock, 10.5))
    policy(batch.tokens_T, batch.attention.positions_T, batch.attention, drafter.tap.watch([text]))
    metrics = drafter.follow(1, {}, 100.0)
    assert metrics["drafter/texts_with_states"] == 1 and metrics["time/drafter_displaced"] == 0.5
    assert drafter.budget.credit == 1 - 0.5
    drafter.expect(groups)
    assert drafter.follow(2, {}, 100.0)["time/drafter_displaced"] == 0


def test_the_engine_records_only_while_the_head_is_due(moved):
    """The states of rollouts that nothing is learned from are not kept; a drift begins to keep them."""
    policy, head = moved
    recording, groups = Recorded(), groups_of(policy, 4)
    drafter = online(policy, head, when="auto", unroll=1, batch=2)
    drafter.probation = Probation(proven=True)
    run_drafter = RunDrafter(drafter, recording, load_config(None, SMALL), warn=print)
    shares = [0.9] * 9 + [0.9] * 5 + [0.7]
    for step, share in enumerate(shares, 1):
        if step == 9:
            drafter.auto.rest()  # its updates have brought nothing
        drafter.observe(share, 5000)
        drafter.expect(groups)
        metrics = run_drafter.follow(step, 1e6)
    assert recording.wanted == [True] * 9 + [False] * 6 + [True], "trials, rest, drift"
    assert metrics["drafter/updates"] > 0 and metrics["drafter/rebuilt"] > 0, "of the texts that it has"
    rested = RunDrafter(online(policy, head, when="drift"), recording, load_config(None, SMALL), warn=print)
    assert recording.wanted[-1] is False
    rested.online.due = True  # as a resumed run's may be
    rested.begin(Path("run"), 3)
    assert recording.wanted[-1] is True


def test_states_of_a_part_of_a_response_do_not_stand_for_all_of_it(moved):
    """A response that went on after an update was a prompt and a shorter response to the engine."""
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
def test_a_card_says_what_was_accepted_by_place_only_of_chains(moved, overrides, known):
    """Trees, and rows that share, count by number of the node."""
    policy, head = moved
    config = load_config(None, [*SMALL, *(f"rollout.speculation.{key}" for key in overrides)])
    run_drafter = RunDrafter(online(policy, head), Recorded(), config, warn=print)
    measured = run_drafter._measured(1, DraftStats(10, 30, 16, [9, 5, 2], 10, 9))
    assert measured.accepted_at == known and measured.first_accepted == 0.9


@pytest.mark.parametrize("when", ["drift", "auto", "always"])
def test_rows_that_share_may_accept_more_under_a_number_than_there_are_drafts(moved, when):
    policy, head = moved
    drafter = online(policy, head, when=when)
    run_drafter = RunDrafter(drafter, Recorded(), load_config(None, SMALL), warn=print)
    drafts = DraftStats(10, 40, 28, [14, 10, 4], 9, 9)
    for step in range(6):
        run_drafter.observe(step, {"eagle": drafts})
    assert drafts.accepted_shares == [1.0, 1.0, 0.4]
    assert drafts.accept_length == 3.8, "of the tokens none is lost"


class Recorded:
    """A generator that notes from when on states are wanted."""

    def __init__(self) -> None:
        self.wanted: list[bool] = []

    def record_states(self, max_bytes: int) -> None:
        assert max_bytes > 0

    def want_states(self, wanted: bool) -> None:
        self.wanted.append(wanted)

    def take_states(self) -> dict:
        return {}


def test_the_engine_records_while_the_learner_passes_over_texts(moved):
    """Its own pass leaves states of what it learns from; more than a quarter without any are recorded."""
    policy, head = moved
    recording, groups = Recorded(), groups_of(policy, 8)
    drafter = online(policy, head, when="auto", unroll=1, batch=2, tokens=160)
    drafter._tokens_of = lambda learned: 160
    drafter._tokens = 160
    run_drafter = RunDrafter(drafter, recording, load_config(None, SMALL), warn=print)
    for step, missing in enumerate((2, 3, 8, 1), 1):
        drafter.expect(groups)
        seen = drafter._texts[: len(drafter._texts) - missing]
        assert len(drafter._texts) == 8
        drafter.tap.found = {text.tokens: states_of(drafter, text) for text in seen}
        run_drafter.follow(step, 1e6)
    assert recording.wanted == [True, False, True, True, False], "at first nobody knows"


def test_where_time_is_short_no_second_pass_is_made_if_an_update_has_its_states(moved):
    """An update is of two passages of 64 tokens, and a quarter of that is enough."""
    policy, head = moved
    groups = groups_of(policy, 8)
    for when, ready, rebuilt in (("auto", 4, 0), ("auto", 1, 0), ("auto", 0, 8), ("always", 4, 4)):
        drafter = online(policy, head, when=when, unroll=1, batch=2, tokens=320)
        drafter._tokens = 320
        drafter.expect(groups)
        states = {text.tokens: states_of(drafter, text) for text in drafter._texts[:ready]}
        metrics = drafter.follow(1, states, 1e6)
        assert metrics["drafter/rebuilt"] == rebuilt and metrics["drafter/updates"] > 0


def test_what_an_update_has_begun_with_keeps_its_states(moved):
    """The buffer lets go of them while half of the update is made; a pass would have to make them again."""
    policy, head = moved
    groups = groups_of(policy, 8)
    drafter = online(policy, head, when="auto", unroll=1, batch=4, tokens=320)
    drafter._tokens = 320
    drafter.expect(groups)
    drafter.buffer.add(1, [Example(text, 1, 0, states_of(drafter, text)) for text in drafter._texts])
    drafter.plan("1", drafter.buffer.examples, 320)
    slices = drafter.slices(lambda: False, idle=False)
    assert next(slices) is None and drafter.trainer.accumulated, "an update has several slices"
    drafter.buffer.max_bytes = 1
    drafter.buffer.shrink()
    assert not drafter.buffer.examples
    assert any(report is not None for report in slices) and drafter.learning.rebuilt == 0


def test_idle_work_ends_at_once(moved):
    policy, head = moved
    drafter = online(policy, head, when="auto", unroll=1, batch=4, budget=1e-9)
    follow(drafter, 1, groups_of(policy, 16), 1.0)
    asked = []
    work = drafter.work(lambda: len(asked) >= 2 or asked.append(1) is not None)
    assert drafter.has_work and len(list(work)) == 2, "asked before every slice"


@pytest.mark.parametrize("enough_for", [0, 2])
def test_without_memory_it_stops_and_says_so(moved, monkeypatch, enough_for):
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


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_its_state_is_all_there_is(dtype):
    """One that goes on from a saved state takes the very same steps; also where masters are not the
    parameters.
    """
    policy = load_policy(BUILTIN_POLICY, dtype)
    head = load_eagle("builtin-eagle", policy, dtype)
    first, second = (online(policy, head, when="drift", unroll=2, batch=4) for _ in range(2))
    # A CPU multiplies bf16 slowly.
    groups = groups_of(policy, 6 if dtype == torch.float32 else 2)
    first.observe(0.9, 5000)
    first.observe(0.8, 5000)
    first.learning.slice_rows //= 2
    follow(first, 1, groups[:1])
    load_online_state(second, {name: tensor.clone() for name, tensor in online_state(first).items()})
    assert second.drift == first.drift and second.auto == first.auto and second.due
    assert second.learning.slice_rows == first.learning.slice_rows
    ours, theirs = (
        {k: v for k, v in follow(o, 2, groups).items() if "time" not in k} for o in (first, second)
    )
    assert ours == theirs and ours["drafter/updates"] > 0
    assert all(
        torch.equal(a, b) for a, b in zip(first.head.parameters(), second.head.parameters(), strict=True)
    )
    assert all(torch.equal(mean, second.average.mean[name]) for name, mean in first.average.mean.items())


def test_of_another_optimiser_the_masters_are_used():
    """A state with AdamW's moments, as it was saved before, in a type that rounds them."""
    policy = load_policy(BUILTIN_POLICY, torch.bfloat16)
    head = load_eagle("builtin-eagle", policy, torch.bfloat16)
    said: list[str] = []
    first, second = (
        OnlineDrafter(policy, head, OnlineDrafterConfig(when="always"), seed=0, warn=said.append)
        for _ in range(2)
    )
    for master in first.trainer.optimiser.masters().values():
        master += 2.0**-12 * master.abs()
    state = {n: t for n, t in online_state(first).items() if "momentum" not in n and "probation" not in n}
    load_online_state(second, state)
    assert "begins anew" in said[-1] and second.probation == Probation() and second.average.updates == 0
    ours, theirs = (drafter.trainer.optimiser.masters() for drafter in (first, second))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_of_an_early_checkpoint_the_head_is_used(moved):
    policy, head = moved
    said: list[str] = []
    drafter = OnlineDrafter(policy, head, OnlineDrafterConfig(when="always"), seed=0, warn=said.append)
    load_early_state(drafter, {})
    assert not said, "there is none"
    early = {f"eagle.{name}": p.detach() + 1 for name, p in head.named_parameters()}
    load_early_state(drafter, {**early, "online.counters": torch.zeros(7)})
    assert all(torch.equal(p, early[f"eagle.{name}"]) for name, p in drafter.head.named_parameters())
    assert "begin anew" in said[0]


# -- in a run ------------------------------------------------------------------------------------------------


def run(tmp_path, name: str, *overrides: str):
    config = load_config(None, [*SMALL, f"run.root={tmp_path}", f"run.name={name}", *overrides])
    return train(config).summary.run


def learned(run) -> list[dict]:
    return [record for record in comparable_metrics(run) if record["kind"] == "train"]


def final_policy(run) -> dict[str, torch.Tensor]:
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    return load_file(newest / "policy" / "model.safetensors") | {
        f"optimiser.{name}": tensor for name, tensor in load_file(newest / "optimiser.safetensors").items()
    }


def spoiled_head(folder: Path) -> Path:
    """Writes the built-in head with noise in its matrices: one that a few updates make better."""
    policy = load_policy(BUILTIN_POLICY, torch.float32)
    head = load_eagle("builtin-eagle", policy, torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += 0.6 * parameter.data.std() * noise
    save_eagle(head, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("when", ["always", "auto"])
def test_a_run_is_the_same_but_for_how_drafts_went(tmp_path, when):
    """Metrics, tokens, weights, and the moments of all gradients are those of a run that learns nothing."""
    keys = ["run.steps=3", f"rollout.speculation.eagle_path={spoiled_head(tmp_path / 'spoiled')}"]
    plain_run = run(tmp_path, "plain", *keys)
    online_keys = [
        f"rollout.speculation.online.{key}" for key in (f"when={when}", "unroll=2", "batch=2", "lr=3e-3")
    ]
    follows_run = run(tmp_path, "follows", *keys, *online_keys)
    plain, follows = learned(plain_run), learned(follows_run)
    own = ("drafter/", "speculation/", "rollout/decode_steps", "rollout/tail_steps")
    for before, after in zip(plain, follows, strict=True):
        kept = {key: value for key, value in before.items() if not key.startswith(own)}
        assert kept == {key: after[key] for key in kept}
    weights, again = final_policy(plain_run), final_policy(follows_run)
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
    for file in sorted((plain_run / "samples").glob("*.jsonl")):
        assert file.read_text() == (follows_run / "samples" / file.name).read_text()
    if when == "always":
        assert all(step["drafter/updates"] > 0 for step in follows)
        assert all(step["drafter/rebuilt"] == 0 for step in follows), "no second pass"
        assert [step["drafter/drafting_version"] for step in follows] == [0, 0, 2], "compared in the second"
        assert follows[-1]["speculation/eagle/accept_length"] != plain[-1]["speculation/eagle/accept_length"]


@pytest.mark.slow
def test_a_head_in_another_process_learns_too(tmp_path):
    """And is the better for it: what the worker drafts with is what was published last."""
    keys = [
        "rollout.mode=async",
        "rollout.max_lag=1",
        *(f"rollout.speculation.online.{key}" for key in ("when=always", "unroll=1", "batch=2")),
    ]
    steps = learned(run(tmp_path, "apart", "run.steps=4", *keys))
    assert all(step["drafter/updates"] > 0 for step in steps)
    assert steps[-1]["drafter/drafting_version"] == 3


@pytest.mark.slow
def test_a_new_head_can_be_made_in_the_run(tmp_path):
    keys = [
        "rollout.speculation.eagle_path=fresh",
        *(f"rollout.speculation.online.{key}" for key in ("when=always", "unroll=1", "batch=2", "lr=3e-3")),
    ]
    steps = learned(run(tmp_path, "fresh", "run.steps=6", *keys))
    assert steps[-1]["drafter/overlap"] > steps[0]["drafter/overlap"] + 0.1, [
        step["drafter/overlap"] for step in steps
    ]
    head = load_eagle(
        str(tmp_path / "fresh" / "drafter"),
        load_policy(BUILTIN_POLICY, torch.float32),
        torch.float32,
    )
    assert head.config.draft_vocab == head.config.layer.vocab_size


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_it_would_have(tmp_path):
    online_keys = (
        "rollout.speculation.online.when=always",
        "rollout.speculation.online.unroll=2",
        "checkpoint.every=1",
    )
    whole = learned(run(tmp_path, "whole", "run.steps=4", *online_keys))
    first = run(tmp_path, "cut", "run.steps=2", *online_keys)
    config = load_config(None, [*SMALL, f"run.root={tmp_path}", "run.name=cut", "run.steps=4", *online_keys])
    train(config, resume=first)
    assert learned(first) == whole
    card = (first / "drafter" / "README.md").read_text()
    assert "| 0 |" in card and "| 3 |" in card, "how it started, and its last rollout"
    kept = [path.name for path in sorted((first / "drafter_training").iterdir())]
    assert kept[-1] == "step_000004.safetensors" and all(name.startswith("step_") for name in kept)


@pytest.mark.slow
def test_a_run_says_what_was_expected_of_its_head_and_what_came(tmp_path, capsys):
    policy = load_policy(BUILTIN_POLICY, torch.float32)
    folder = tmp_path / "head"
    save_eagle(load_eagle("builtin-eagle", policy, torch.float32), folder)
    write_card(folder, None, MeasuredAcceptance("builtin", "other sums", 1.0, 9, 500, 6.0, 0.999))
    config = load_config(
        None,
        [
            *SMALL,
            f"run.root={tmp_path}",
            "run.name=told",
            "run.steps=1",
            f"rollout.speculation.eagle_path={folder}",
            "rollout.speculation.online.when=drift",
        ],
    )
    train(config, console=Console())
    said = capsys.readouterr()
    text = " ".join((said.out + said.err).split())
    assert "other sums" in text and "less than expected" in text


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["rollout.speculation.drafters=[history]", "rollout.speculation.online.when=drift"],
            "online.when = 'drift' does not apply.*lacks 'eagle'",
        ),
        (
            ["rollout.speculation.eagle_path=fresh", "rollout.speculation.online.when=drift"],
            "'fresh' starts from nothing.*Use online.when=always or auto",
        ),
        (
            ["rollout.speculation.online.when=always", "rollout.speculation.online.budget=0.1"],
            "online.budget = 0.1 does not apply.*Use when=auto",
        ),
        (
            ["rollout.speculation.online.lr=2e-3"],
            "online.lr = 0.002 does not apply: rollout.speculation.online.when = 'never'",
        ),
    ],
)
def test_keys_that_nobody_would_read_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config(None, [*SMALL, *overrides])


def test_a_policy_without_a_head_is_refused(tmp_path):
    from tests.loop_helpers import make_tiny_policy

    folder = make_tiny_policy(tmp_path / "tiny")
    with pytest.raises(ConfigError, match="no eagle head drafts for this policy.*paceline drafter train"):
        run(
            tmp_path, "none", f"policy.path={folder}", "run.steps=1", "rollout.speculation.online.when=always"
        )


@pytest.mark.gpu
def test_a_head_learns_where_the_graphs_read_it():
    """Drafts of an engine whose graphs were captured before the head learned are those of a new engine."""
    policy = load_policy(BUILTIN_POLICY, torch.bfloat16, torch.device("cuda"))
    head = load_eagle("builtin-eagle", policy, torch.bfloat16, torch.device("cuda"))

    def engine() -> Engine:
        settings = EngineSettings(max_running=8, kv_tokens=4096, deterministic=True)
        return Engine(policy, settings, drafters=[EagleDrafter(head)], pacer=FixedPacer(Strategy("eagle", 3)))

    def accepted(engine: Engine) -> list[int]:
        requests = [
            Request(str(i), (3 + i, 9, 4, 8), i, SamplingParams(max_tokens=60, ignore_eos=True))
            for i in range(8)
        ]
        engine.submit(requests)
        assert len(list(engine.completions())) == 8
        return engine.take_stats().drafts["eagle"].accepted_at

    old = engine()
    before = accepted(old)
    config = OnlineDrafterConfig(when="always", lr=1e-2, unroll=2, batch=2)
    drafter = OnlineDrafter(policy, head, config, 0, print, drafting=old)
    drafter.probation = Probation(proven=True)  # however it drafts
    follow(drafter, 1, groups_of(policy, 16))
    assert drafter.publisher.current.version == 1
    assert accepted(old) == accepted(engine()) != before


@pytest.mark.parametrize("armed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_cache_is_given_up_once_a_step(armed, tmp_path, monkeypatch):
    """The policy learns, then its head, then the generator gets its memory back; and rollouts find it.

    Twice where the sentinel may want another cache after the update.
    """
    calls = []
    monkeypatch.setattr(Session, "_gives_memory", True)
    monkeypatch.setattr(Sentinel, "armed", armed)
    for name in ("sleep", "wake"):
        plain = getattr(Engine, name)
        monkeypatch.setattr(
            Engine, name, lambda self, name=name, plain=plain: (calls.append(name), plain(self))[1]
        )
    follow = RunDrafter.follow
    monkeypatch.setattr(RunDrafter, "follow", lambda *given: (calls.append("drafter"), follow(*given))[1])
    run(tmp_path, "sleeps", "run.steps=2", "rollout.speculation.online.when=always")
    expected = [*(["sleep", "wake"] if armed else []), "sleep", "drafter", "wake"] * 2
    assert calls[: len(expected)] == expected and "wake" not in calls[len(expected) :], "it ends asleep"
