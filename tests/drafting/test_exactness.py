"""Promise 1 and promise of speculation: whatever proposes, and whenever that changes, the completions are the
same bits.
"""

import functools
import random
from pathlib import Path

import pytest
import torch

from paceline.drafting.base import Drafter, DrafterContext
from paceline.drafting.history import HistoryDrafter
from paceline.engine.engine import Engine, EngineSettings
from paceline.pacing.strategy import PLAIN, FixedPacer, Strategy
from paceline.policy.huggingface import load_policy
from paceline.types import Completion, FinishReason, Request, SamplingParams
from tests.engine.test_engine import bits, grouped_requests
from tests.oracles import EVERY_FAMILY, FAMILIES, small_model


class ScriptedDrafter(Drafter):
    """Base of the drafters below: no state, proposals from `tokens_for(slot, position)`."""

    max_tokens = 15

    def bind(self, context: DrafterContext) -> None:
        super().bind(context)
        self.rows, self.proposals_SK = context.rows, context.proposals_SK
        self.requests: dict[int, Request] = {}

    def observe_enter(self, slot: int, request: Request, handover: torch.Tensor | None) -> None:
        self.requests[slot] = request

    def observe_leave(self, slot: int, request: Request, length: int, finished: bool) -> None:
        del self.requests[slot]

    def propose(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        for slot in slots_R.tolist():
            if slot in self.requests:
                start = int(self.rows.length[slot]) - len(self.requests[slot].prompt)
                self.proposals_SK[slot, :count] = torch.tensor(
                    self.tokens_for(self.requests[slot], start, count)
                )


class RandomDrafter(ScriptedDrafter):
    name = "random"

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def tokens_for(self, request: Request, start: int, count: int) -> list[int]:
        return [self.rng.randrange(97) for _ in range(count)]


class OracleDrafter(ScriptedDrafter):
    """Knows the answers; after them it continues with nonsense, which stops and limits must cut."""

    name = "oracle"

    def __init__(self, answers: dict[str, Completion]) -> None:
        self.answers = answers

    def tokens_for(self, request: Request, start: int, count: int) -> list[int]:
        known = list(self.answers[request.id].tokens[start : start + count])
        return known + [5] * (count - len(known))


class HalfRightDrafter(OracleDrafter):
    name = "half-right"

    def tokens_for(self, request: Request, start: int, count: int) -> list[int]:
        known = super().tokens_for(request, start, count)
        return [(t + 1) % 97 if (start + i) % 3 == 2 else t for i, t in enumerate(known)]


# A model of each family; those of a process are written once, whichever modules ask.
SAVED: dict[str, Path] = {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    for family in FAMILIES:
        if family not in SAVED:
            SAVED[family] = tmp_path_factory.mktemp(family)
            small_model(family).save_pretrained(SAVED[family])
    return SAVED


def run(
    folder, requests, drafters=(), strategy=PLAIN, between=lambda engine, count: None, **settings
) -> tuple[Engine, dict[str, Completion]]:
    settings = {"max_running": 8, "kv_tokens": 2048, **settings}
    engine = Engine(
        load_policy(folder, torch.float32),
        EngineSettings(**settings),
        drafters=drafters,
        pacer=FixedPacer(strategy, 1000),
    )
    engine.submit(requests)
    done = {}
    for completion in engine.completions():
        done[completion.request.id] = completion
        between(engine, len(done))
    assert len(done) == len(requests) and engine.pool.used == 0
    return engine, done


def plain_run(folder, requests: list[Request], **settings) -> dict[str, Completion]:
    """Returns what plain decoding gives; many tests compare with the same."""
    return dict(_plain_run(folder, tuple(requests), **settings))


@functools.cache
def _plain_run(folder, requests: tuple[Request, ...], **settings) -> dict[str, Completion]:
    return run(folder, requests, **settings)[1]


@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("count", [*(pytest.param(count, marks=pytest.mark.slow) for count in (1, 4)), 15])
def test_drafters_give_the_bits_of_plain_decoding(family, count, folders):
    requests = grouped_requests(prompts=4, samples=3, longest=50)
    plain = plain_run(folders[family], requests)
    for drafter in (
        RandomDrafter(),
        OracleDrafter(plain),
        HalfRightDrafter(plain),
        HistoryDrafter(bank_tokens=200),
    ):
        engine, done = run(folders[family], requests, [drafter], Strategy(drafter.name, count))
        assert bits(done) == bits(plain), drafter.name
        stats = engine.take_stats()
        if drafter.name == "oracle":
            assert len(stats.running) < 60 / min(count, 4), "a right drafter saves steps"
            assert stats.drafts["oracle"].accept_length > 1.5


def test_strategy_changes_keep_the_bits(folders):
    requests = grouped_requests(prompts=6, samples=3, longest=60)
    plain = plain_run(folders["qwen3"], requests)
    rng = random.Random(3)
    choices = [
        PLAIN,
        Strategy("history", 3),
        Strategy("random", 2),
        Strategy("half-right", 7),
        Strategy("history", 15),
    ]

    def switch(engine: Engine, count: int) -> None:
        engine.pacer = FixedPacer(rng.choice(choices), 1000)

    drafters = [HistoryDrafter(), RandomDrafter(), HalfRightDrafter(plain)]
    engine, done = run(folders["qwen3"], requests, drafters, Strategy("history", 4), switch, kv_tokens=256)
    assert bits(done) == bits(plain)
    assert engine.preemptions > 0 and len(set(engine.take_stats().strategies)) >= 4


def test_decoding_stops_at_stops_and_limits_inside_an_accepted_run(folders):
    """Every max_tokens from 1 to 20 and a stop token inside the run, with a drafter that is always right."""
    prompt = (5, 6, 7)
    free = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9)
    long = plain_run(folders["llama"], [Request("r", prompt, 3, free)])
    tokens = long["r"].tokens
    requests = [
        Request(f"{n}", prompt, 3, SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.9))
        for n in range(1, 21)
    ]
    requests += [
        Request(
            f"stop{i}",
            prompt,
            3,
            SamplingParams(max_tokens=20, stop_token_ids=(t,), ignore_eos=True, temperature=0.9),
        )
        for i, t in enumerate(tokens)
    ]
    oracle = OracleDrafter({r.id: long["r"] for r in requests})
    _, done = run(
        folders["llama"], requests, [oracle], Strategy("oracle", 15), max_running=40, kv_tokens=4096
    )
    for n in range(1, 21):
        assert done[str(n)].tokens == tokens[:n] and done[str(n)].finish_reason is FinishReason.LENGTH
    for i, token in enumerate(tokens):
        assert (
            done[f"stop{i}"].tokens == tokens[: tokens.index(token) + 1]
            and done[f"stop{i}"].finish_reason is FinishReason.STOP
        )
        assert done[f"stop{i}"].logprobs == long["r"].logprobs[: tokens.index(token) + 1]


def test_decoding_respects_the_models_own_limit(folders):
    request = Request("r", (5,) * 250, 3, SamplingParams(max_tokens=50, ignore_eos=True))
    plain = plain_run(folders["llama"], [request])
    _, done = run(folders["llama"], [request], [OracleDrafter(plain)], Strategy("oracle", 15))
    assert bits(done) == bits(plain) and len(plain["r"].tokens) == 6


def test_history_follows_siblings_and_earlier_epochs(folders):
    """Greedy siblings write the same text: the second of two rows needs a fraction of the steps, and the next
    epoch fewer.
    """
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    history = HistoryDrafter()
    first = [Request("a", tuple(range(5, 30)), 1, greedy)]
    engine, _ = run(folders["llama"], first, [history], Strategy("history", 7))
    engine.take_stats()
    engine.submit([Request("b", tuple(range(5, 30)), 2, greedy)])
    list(engine.completions())
    stats = engine.take_stats()
    assert len(stats.running) <= 7 and stats.drafts["history"].accept_length > 5
    assert stats.drafts["history"].accepted_at[0] >= stats.drafts["history"].accepted_at[6] > 0

    restored = HistoryDrafter()
    engine2 = Engine(
        engine.policy, engine.settings, drafters=[restored], pacer=FixedPacer(Strategy("history", 7), 8)
    )
    restored.load_state(history.state())
    engine2.submit([Request("c", tuple(range(5, 30)), 3, greedy)])
    list(engine2.completions())
    assert len(engine2.take_stats().running) <= 7, "what it knew survives a restart"


def test_history_bank_forgets_the_oldest(folders):
    history = HistoryDrafter(bank_tokens=30)
    requests = [
        Request(str(i), (5 + i % 4, 6), i, SamplingParams(max_tokens=5, ignore_eos=True)) for i in range(20)
    ]
    run(folders["llama"], requests, [history], Strategy("history", 3))
    assert [entry.number for entry in history.ring.entries] == [18, 19, 20] and not history.running
