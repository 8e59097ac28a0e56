"""Drafters with layers: what they propose is what their model says, and completions stay the same bits
whatever that is.
"""

import random
from dataclasses import replace

import pytest
import torch

from paceline.drafting.base import Drafter
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.drafting.history import HistoryDrafter
from paceline.engine.engine import Engine, EngineSettings
from paceline.kernels.sampler import sample, sample_truncated
from paceline.pacing.strategy import PLAIN, FixedPacer, Strategy
from paceline.policy.attention import PackedAttention
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy
from paceline.types import Request, SamplingParams
from tests.drafting.heads import random_head
from tests.drafting.test_exactness import folders, plain_run, run  # noqa: F401  (a fixture)
from tests.engine.test_engine import bits, grouped_requests
from tests.oracles import EVERY_FAMILY


def make_eagle(policy: Decoder, draft_vocab: int = 0) -> EagleDrafter:
    head = EagleHead(
        config_for(policy.config, captured_layers=(0, 1, 2), draft_vocab=draft_vocab), policy.dtype
    )
    chosen = torch.randperm(policy.config.vocab_size, generator=torch.Generator().manual_seed(5))[
        : len(head.draft_to_target)
    ]
    head.draft_to_target.copy_(chosen.sort().values)
    return EagleDrafter(random_head(head, policy, seed=1))


def make_drafter(kind: str, folder, dtype=torch.float32, draft_vocab: int = 0) -> Drafter:
    policy = load_policy(folder, dtype)
    if kind == "eagle":
        return make_eagle(policy, draft_vocab)
    with torch.no_grad():  # the policy itself, slightly off: it is right often, not always
        for parameter in policy.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3), dtype=dtype) * 0.05
            )
    return DraftModel(policy)


@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("kind", ["eagle", "draft_model"])
@pytest.mark.parametrize("count", [*(pytest.param(count, marks=pytest.mark.slow) for count in (1, 3)), 7])
def test_model_drafters_give_the_bits_of_plain_decoding(family, kind, count, folders):  # noqa: F811
    requests = grouped_requests(prompts=4, samples=3, longest=40)
    plain = plain_run(folders[family], requests)
    _, done = run(folders[family], requests, [make_drafter(kind, folders[family])], Strategy(kind, count))
    assert bits(done) == bits(plain)


@pytest.mark.slow
def test_changes_between_all_drafters_keep_the_bits(folders):  # noqa: F811
    """With a pool so small that rows are preempted and come back, chunked prefills and siblings."""
    requests = grouped_requests(prompts=6, samples=3, longest=50)
    plain = plain_run(folders["qwen3"], requests)
    rng = random.Random(3)
    choices = [
        PLAIN,
        Strategy("history", 3),
        Strategy("eagle", 4),
        Strategy("draft_model", 2),
        Strategy("draft_model", 6),
        Strategy("eagle", 1),
    ]

    def switch(engine: Engine, count: int) -> None:
        engine.pacer = FixedPacer(rng.choice(choices), 1000)

    drafters = [
        HistoryDrafter(),
        make_drafter("eagle", folders["qwen3"]),
        make_drafter("draft_model", folders["qwen3"]),
    ]
    engine, done = run(
        folders["qwen3"], requests, drafters, Strategy("eagle", 4), switch, kv_tokens=256, prefill_tokens=11
    )
    assert bits(done) == bits(plain)
    assert engine.preemptions > 0 and len(set(engine.take_stats().strategies)) >= 5


class Watched:
    """Keeps each row's tokens and what was proposed behind them."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.seen = drafter, []
        propose = drafter.propose

        def record(slots_R: torch.Tensor, count: int, truncates: bool) -> None:
            propose(slots_R, count, truncates)
            rows = drafter.context.rows
            for slot in slots_R.tolist():
                if rows.active[slot]:
                    length = int(rows.length[slot])
                    sampling = tuple(
                        getattr(rows, name)[slot : slot + 1].clone()
                        for name in ("temperature", "seed", "top_k", "top_p", "min_p")
                    )
                    useful = min(
                        count, int(rows.limit[slot]) - length
                    )  # what lies behind the row's limit is cut, whatever it is
                    tokens, proposed = (
                        rows.tokens[slot, :length].clone(),
                        drafter.context.proposals_SK[slot, :useful].tolist(),
                    )
                    self.seen.append((tokens, sampling, proposed, truncates))

        drafter.propose = record


def naive_draw(logits_V: torch.Tensor, position: int, sampling: tuple, truncates: bool) -> int:
    temperature, seed, *truncation = sampling
    where = torch.tensor([position])
    if truncates:
        return int(sample_truncated(logits_V.unsqueeze(0), temperature, seed, where, *truncation)[0])
    return int(sample.reference(logits_V.unsqueeze(0), temperature, seed, where)[0])


def naive_draft_model(
    policy: Decoder, tokens_L: torch.Tensor, sampling: tuple, count: int, truncates: bool
) -> list[int]:
    tokens = tokens_L.tolist()
    for _ in range(count):
        packed = PackedAttention([len(tokens)], policy.device)
        hidden = policy(torch.tensor(tokens), packed.positions_T, packed)
        tokens.append(naive_draw(policy.logits(hidden[-1:])[0], len(tokens), sampling, truncates))
    return tokens[len(tokens_L) :]


def naive_eagle(
    policy: Decoder, head: EagleHead, tokens_L: torch.Tensor, sampling: tuple, count: int, truncates: bool
) -> list[int]:
    """From the definition in `eagle_head.py`, one draft at a time, without any cache."""
    length, captured = len(tokens_L), []
    packed = PackedAttention([length - 1], policy.device)
    x = policy.embedding(tokens_L[:-1])
    for index, layer in enumerate(policy.layers):
        if index in head.config.captured_layers:
            captured.append(x)
        x = layer(x, policy.rope_table[packed.positions_T], index, packed)
    states, tokens = head.features(captured), tokens_L.tolist()
    for _ in range(count):
        packed = PackedAttention([len(tokens) - 1], policy.device)
        out = head(states, policy.embedding(torch.tensor(tokens[1:])), packed.positions_T, packed)[-1:]
        logits_V = torch.full((policy.config.vocab_size,), -torch.inf, dtype=out.dtype)
        logits_V[head.draft_to_target] = head.logits(out)[0]
        tokens.append(naive_draw(logits_V, len(tokens), sampling, truncates))
        states = torch.cat((states, out))
    return tokens[length:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "draft_model"])
@pytest.mark.parametrize("truncated", [False, True])
def test_proposals_are_what_the_drafters_model_says(kind, truncated, folders):  # noqa: F811
    """In float64, against a computation without caches: through shared prompts, chunks, preemption and
    changes of strategy.
    """
    requests = grouped_requests(prompts=5, samples=3, longest=40, seed=4)
    if truncated:
        cut = dict(temperature=0.9, top_k=20, top_p=0.9, max_tokens=20, ignore_eos=True)
        requests = [Request(r.id, r.prompt, r.seed, SamplingParams(**cut)) for r in requests]
    policy = load_policy(folders["qwen3"], torch.float64)
    drafter = make_drafter(kind, folders["qwen3"], torch.float64, draft_vocab=70 if truncated else 0)
    watched = Watched(drafter)
    settings = EngineSettings(max_running=6, kv_tokens=256, prefill_tokens=13)
    engine = Engine(policy, settings, drafters=[drafter], pacer=FixedPacer(Strategy(kind, 3), 1000))
    engine.submit(requests)
    for number, _ in enumerate(engine.completions()):
        engine.pacer = FixedPacer(PLAIN if number % 3 == 1 else Strategy(kind, 1 + number % 5), 1000)
    assert engine.preemptions > 0
    compared = 0
    with torch.no_grad():
        for tokens_L, sampling, proposed, truncates in watched.seen:
            if len(tokens_L) < 2:
                # a row of one token has nothing to draft from, and its first proposal is not defined
                continue
            if kind == "eagle":
                expected = naive_eagle(policy, drafter.head, tokens_L, sampling, len(proposed), truncates)
            else:
                expected = naive_draft_model(drafter.policy, tokens_L, sampling, len(proposed), truncates)
            assert proposed == expected, len(tokens_L)
            compared += 1
    assert compared > 60


@pytest.mark.slow
def test_perfect_draft_model_saves_steps(folders):  # noqa: F811
    requests = grouped_requests(prompts=3, samples=2, longest=40)
    plain = plain_run(folders["llama"], requests)
    engine, done = run(
        folders["llama"],
        requests,
        [DraftModel(load_policy(folders["llama"], torch.float32))],
        Strategy("draft_model", 5),
    )
    stats = engine.take_stats().drafts["draft_model"]
    assert bits(done) == bits(plain)
    assert stats.accept_length > 3.5, "every proposal is right; only the ends of responses cut them"


def test_sleep_and_new_weights_leave_no_stale_entries(folders):  # noqa: F811
    """After waking, an always-right draft model is right again: its cache was rebuilt, not trusted."""
    policy = load_policy(folders["llama"], torch.float32)
    drafter = DraftModel(load_policy(folders["llama"], torch.float32))
    eagle = make_eagle(policy)
    engine = Engine(
        policy,
        EngineSettings(max_running=4, kv_tokens=1024),
        drafters=[drafter, eagle],
        pacer=FixedPacer(Strategy("draft_model", 3), 9),
    )
    request = Request("r", tuple(range(5, 40)), 7, SamplingParams(max_tokens=30, ignore_eos=True))
    engine.submit([request])
    engine.sleep()
    engine.wake()
    (first,) = engine.completions()
    assert engine.take_stats().drafts["draft_model"].accept_length > 3.5
    engine.update_weights(version=1)
    engine.submit([request])
    (second,) = engine.completions()
    assert second.tokens == first.tokens and engine.take_stats().drafts["draft_model"].accept_length > 3.5


def test_drafter_of_another_policy_is_refused(folders):  # noqa: F811
    policy = load_policy(folders["llama"], torch.float32)
    deeper = replace(policy.config, num_layers=12)
    for config, problem in (
        (deeper, "captured layers"),
        (replace(policy.config, vocab_size=50), "vocab_size is 50"),
    ):
        with pytest.raises(ValueError, match=problem):
            Engine(
                policy,
                EngineSettings(max_running=2, kv_tokens=256),
                drafters=[EagleDrafter(EagleHead(config_for(config)))],
            )
    with pytest.raises(ValueError, match="share a tokenizer"):
        Engine(
            policy,
            EngineSettings(max_running=2, kv_tokens=256),
            drafters=[DraftModel(Decoder(replace(policy.config, vocab_size=50)))],
        )


def test_draft_model_cache_is_right_after_a_row_of_one_token(folders):  # noqa: F811
    """The first pass has no token before its last and proposes poorly; the policy's own copy must be right
    ever after.
    """
    policy = load_policy(folders["llama"], torch.float32)
    drafter = DraftModel(policy)
    engine = Engine(
        policy,
        EngineSettings(max_running=1, kv_tokens=512),
        drafters=[drafter],
        pacer=FixedPacer(Strategy("draft_model", 3)),
    )
    gains, changes, propose = [], [], drafter.propose
    engine.outcomes.observer = lambda sequences, lengths, gained: gains.append(int(gained[0]))

    def watched(slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        (storage,) = drafter.cache.storages.values()
        entry_L2HD = storage.tensor[:, :, int(drafter.context.rows.block_table[slots_R[0], 0]), 0]
        before = entry_L2HD.clone()
        propose(slots_R, count, truncates)
        changes.append(float((entry_L2HD - before).abs().max()))

    drafter.propose = watched
    engine.submit([Request("x", (5,), 1, SamplingParams(max_tokens=41, ignore_eos=True))])
    list(engine.completions())
    assert changes[0] == 0.0, "what catching up stored of the only token"
    assert all(gain == 4 for gain in gains[1:-1])
