"""A head that learns while the policy does: when it learns, from what, that it helps, and that nothing else
changes.
"""

import copy
import random
from dataclasses import replace

import pytest
import torch

from paceline.config import ConfigError, OnlineDrafterConfig, load_config
from paceline.drafting import online as online_module
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_folder import load_eagle
from paceline.drafting.online import MAX_TOKENS, PATIENCE, DriftMonitor, OnlineDrafter, cut_padded, longest
from paceline.drafting.training import teacher_states
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.reference import ReferenceBackend
from paceline.learning.batch import TrainingSequence, pack
from paceline.learning.checkpoint import load_drafters
from paceline.loop import train
from paceline.models.source import BUILTIN_POLICY
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.huggingface import load_policy
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


# -- when ----------------------------------------------------------------------------------------------------


def learns(drift: DriftMonitor, chances: list[float], drafts: int, seed: int = 0) -> list[bool]:
    """What it says of rollouts in which each draft's first token is accepted with these chances."""
    rng = random.Random(seed)
    shares = [sum(rng.random() < chance for _ in range(drafts)) / drafts for chance in chances]
    return [drift.update(share, drafts) for share in shares]


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


# -- from what -----------------------------------------------------------------------------------------------


def sequence(prompt: int, response: int, sampled: bool = True) -> TrainingSequence:
    tokens = tuple((7 * i + prompt) % 20 + 1 for i in range(prompt + response))
    return TrainingSequence(tokens, prompt, (sampled,) * response, (0.0,) * response, 0.0, 1.0)


def test_the_longest_responses_come_first():
    sequences = [sequence(3, length) for length in (5, 40, 12, 30)]
    assert [s.loss_tokens for s in longest(sequences, 75)] == [40, 30]
    assert [s.loss_tokens for s in longest(sequences, 10)] == [40], "at least one"
    assert longest([sequence(3, 9, sampled=False)], 100) == [] == longest([], 100)


def test_most_of_a_step_is_not_looked_at():
    """Only what can be chosen is made into sequences, long prompts counted as what they leave of a text."""
    lengths = [(MAX_TOKENS - 10, 500), (5, 300), (5, 200), (5, 100), (5, 0)]
    requests = [Request(str(i), (1,) * prompt, i, SamplingParams()) for i, (prompt, _) in enumerate(lengths)]
    completions = [
        Completion(r, (2,) * n, (0.0,) * n, FinishReason.LENGTH, ())
        for r, (_, n) in zip(requests, lengths, strict=True)
    ]
    groups = [Group("a", tuple(Sample(completion, Score(0.0, False)) for completion in completions))]
    assert [c.request.id for c in online_module._longest_texts(groups, 400)] == ["1", "2"]
    assert [c.request.id for c in online_module._longest_texts(groups, 605)] == ["1", "2", "3", "0"]


def test_of_a_long_response_the_beginning_is_used():
    """Whose states are those of the whole: nothing a causal policy computed there depends on what follows."""
    whole = sequence(5, MAX_TOKENS + 30)
    (beginning,) = longest([whole], 100)
    assert (
        beginning.tokens == whole.tokens[:MAX_TOKENS]
        and len(beginning.loss_mask) == len(beginning.rollout_logprobs) == MAX_TOKENS - 5
    )
    policy = load_policy(BUILTIN_POLICY, torch.float32)
    short = replace(
        whole,
        tokens=whole.tokens[:60],
        loss_mask=whole.loss_mask[:55],
        rollout_logprobs=whole.rollout_logprobs[:55],
    )
    states = [
        teacher_states(policy, pack([s], policy.device), (1, 2))[0][:50]
        for s in (short, replace(short, tokens=short.tokens[:50] + (1,) * 10))
    ]
    torch.testing.assert_close(*states)


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
    """Responses that the policy itself wrote."""
    prompts = [(3 + i % 5, 9, 4, 8, 5, 7) for i in range(count)]
    requests = [
        Request(str(i), prompt, 1000 + i, SamplingParams(max_tokens=40, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]
    backend = ReferenceBackend(policy)
    backend.submit(requests)
    with torch.inference_mode():
        completions = list(backend.completions())
    return [Group("sums", tuple(Sample(completion, Score(0.0, False)) for completion in completions))]


def online(policy, head, when: str = "always", **settings) -> OnlineDrafter:
    return OnlineDrafter(
        policy, head, OnlineDrafterConfig(when=when, **settings), seed=0, warn=lambda message: None
    )


def test_the_head_follows_a_policy_that_moved(moved):
    policy, head = moved[0], copy.deepcopy(moved[1])
    weights, places = (
        {name: p.clone() for name, p in policy.named_parameters()},
        [p.data_ptr() for p in head.parameters()],
    )
    drafter, groups = online(policy, head, lr=1e-3, unroll=2, batch=8), groups_of(policy, 32)
    reports = [drafter.follow(step, groups) for step in range(8)]
    assert reports[0]["drafter/updates"] == 4 and reports[1]["drafter/updates"] == 8, (
        "this step's responses, then also the last one's"
    )
    assert reports[-1]["drafter/overlap"] > reports[0]["drafter/overlap"] + 0.05, reports
    assert reports[-1]["drafter/kl"] < 0.7 * reports[0]["drafter/kl"]
    assert all(torch.equal(p, weights[name]) and p.grad is None for name, p in policy.named_parameters())
    assert [p.data_ptr() for p in head.parameters()] == places, "where the engine's graphs read it"


def test_drift_decides(moved):
    policy, head = moved[0], copy.deepcopy(moved[1])
    drafter, groups = online(policy, head, when="drift", unroll=1), groups_of(policy, 4)
    updates = []
    for step, (accepted, drafts) in enumerate(((0.9, 5000), (0.8, 5000), (0.0, 0), (0.9, 5000), (0.9, 5000))):
        updates.append(drafter.follow(step, groups)["drafter/updates"])
        drafter.observe(accepted, drafts)
    assert updates == [0, 0, 1, 1, 0], "as the last rollout in which it drafted said"


@pytest.mark.parametrize("enough_for", [0, 2])
def test_without_memory_it_stops_and_says_so(moved, monkeypatch, enough_for):
    policy, head = moved[0], copy.deepcopy(moved[1])
    said: list[str] = []
    drafter = OnlineDrafter(
        policy, head, OnlineDrafterConfig(when="always", unroll=1, batch=4), seed=0, warn=said.append
    )
    before, budget = {name: p.clone() for name, p in head.named_parameters()}, drafter.token_budget
    accumulate, calls = drafter.trainer.accumulate, []

    def out_of_memory(*arguments):
        accumulate(*arguments)  # gradients are there already
        calls.append(arguments)
        if len(calls) > enough_for:
            raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(drafter.trainer, "accumulate", out_of_memory)
    metrics = drafter.follow(1, groups_of(policy, 16))
    assert metrics["drafter/updates"] == drafter.trainer.optimiser.steps == enough_for
    assert drafter.token_budget == budget // 2 and "no memory" in said[0]
    assert all(
        torch.equal(p, before[name]) == (enough_for == 0) and p.grad is None
        for name, p in head.named_parameters()
        if p.ndim > 1
    )


def test_micro_batches_are_counted_with_their_padding():
    sequences = [sequence(4, length) for length in (96, 16, 16, 16, 16, 46)]
    parts = cut_padded(sequences, 200)
    assert [[len(s.tokens) for s in part] for part in parts] == [[100, 50], [20, 20, 20, 20]]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_its_state_is_all_there_is(dtype):
    """One that goes on from a saved state, its head included, takes the very same steps; also where masters
    are not the parameters.
    """
    policy = load_policy(BUILTIN_POLICY, dtype)
    first, second = (
        online(policy, load_eagle("builtin-eagle", policy, dtype), when="drift", unroll=2, batch=4)
        for _ in range(2)
    )
    # A CPU multiplies bf16 slowly.
    groups = groups_of(policy, 12 if dtype == torch.float32 else 2)
    first.observe(0.9, 5000)
    first.observe(0.8, 5000)
    first.token_budget //= 2
    first.follow(1, groups[:1])
    second.trainer.head.load_state_dict(first.trainer.head.state_dict())
    second.load_state({name: tensor.clone() for name, tensor in first.state().items()})
    assert second.drift == first.drift and second.due and second.token_budget == first.token_budget
    assert first.follow(2, groups) == second.follow(2, groups)
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.trainer.head.parameters(), second.trainer.head.parameters(), strict=True)
    )


def test_counters_of_an_early_checkpoint_load():
    """They were one list of numbers without names."""
    policy = load_policy(BUILTIN_POLICY, torch.float32)
    first, second = (online(policy, load_eagle("builtin-eagle", policy, torch.float32)) for _ in range(2))
    first.drift = DriftMonitor(0.7, 5000.0, 3, 2)
    first.token_budget //= 2
    state = {name: tensor for name, tensor in first.state().items() if ".counter." not in name}
    early = [first.trainer.optimiser.steps, first.due, first.token_budget, 0.7, 5000.0, 3, 2]
    second.load_state({**state, "online.counters": torch.tensor(early, dtype=torch.float64)})
    assert second.drift == first.drift and second.token_budget == first.token_budget
    assert second.due == first.due


# -- in a run ------------------------------------------------------------------------------------------------


def run(tmp_path, name: str, *overrides: str):
    config = load_config(None, [*SMALL, f"run.root={tmp_path}", f"run.name={name}", *overrides])
    return train(config).summary.run


def learned(run) -> list[dict]:
    return [record for record in comparable_metrics(run) if record["kind"] == "train"]


@pytest.mark.slow
def test_a_run_is_the_same_but_for_how_drafts_went(tmp_path):
    plain = learned(run(tmp_path, "plain", "run.steps=3"))
    online_keys = [
        f"rollout.speculation.online.{key}" for key in ("when=always", "unroll=2", "batch=2", "lr=1e-2")
    ]
    follows = learned(run(tmp_path, "follows", "run.steps=3", *online_keys))
    own = ("drafter/", "speculation/", "rollout/decode_steps", "rollout/tail_steps")
    for before, after in zip(plain, follows, strict=True):
        kept = {key: value for key, value in before.items() if not key.startswith(own)}
        assert kept == {key: after[key] for key in kept}
        assert after["drafter/updates"] > 0
    assert follows[-1]["speculation/eagle/accept_length"] != plain[-1]["speculation/eagle/accept_length"]
    checkpoints = tmp_path / "follows" / "checkpoints"
    head = load_eagle(
        str(checkpoints / "eagle"),
        load_policy(checkpoints / "step_000003" / "policy", torch.float32),
        torch.float32,
    )
    kept = load_drafters(checkpoints / "step_000003")
    assert all(torch.equal(tensor, kept[f"eagle.{name}"]) for name, tensor in head.state_dict().items()), (
        "a drafter to serve the policy with"
    )


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
        str(tmp_path / "fresh" / "checkpoints" / "eagle"),
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


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["rollout.speculation.drafters=[history]", "rollout.speculation.online.when=drift"],
            "online.when = 'drift' does not apply.*lacks 'eagle'",
        ),
        (
            ["rollout.speculation.eagle_path=fresh", "rollout.speculation.online.when=drift"],
            "'fresh' starts from nothing.*Use online.when=always",
        ),
        (
            ["rollout.speculation.online.lr=1e-3"],
            "online.lr = 0.001 does not apply: rollout.speculation.online.when = 'never'",
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
    online(policy, head, lr=1e-2, unroll=2, batch=2).follow(1, groups_of(policy, 16))
    assert accepted(old) == accepted(engine()) != before
