"""The history drafter's memory: whose responses it keeps, what it forgets, and what a checkpoint brings
back.
"""

import random

import pytest
import torch

from paceline.drafting.history import HistoryDrafter
from paceline.drafting.history_bank import Ring
from paceline.engine.engine import Engine, EngineSettings
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.types import Completion, Purpose, Request, SamplingParams

SHAPE = DecoderConfig("llama", 40, 16, 16, 1, 2, 1, 8, 128, eos_token_ids=(2,))


def make_engine(history: HistoryDrafter, **settings) -> Engine:
    pacer = FixedPacer(Strategy("history", 5), 64)
    return Engine(
        Decoder(SHAPE).initialise(0),
        EngineSettings(**{"max_running": 8, "kv_tokens": 2048, **settings}),
        drafters=[history],
        pacer=pacer,
    )


def run(
    engine: Engine,
    prompts: list[tuple[int, ...]],
    samples: int = 2,
    purpose: Purpose = Purpose.TRAIN,
    tag: int = 0,
    tokens: int = 8,
) -> list[Completion]:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    seeds = [(i, p, 1000 * tag + 10 * i + s) for i, p in enumerate(prompts) for s in range(samples)]
    engine.submit([Request(f"{tag}/{seed}", p, seed, sampling, purpose=purpose) for _, p, seed in seeds])
    return sorted(engine.completions(), key=lambda c: c.request.seed)


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.choices(range(3, 40), k=6)) for _ in range(count)]


def kept(history: HistoryDrafter) -> list[list[int]]:
    return [history.index.bank_T[e.start : e.start + e.length].tolist() for e in history.ring.entries]


def text(completion: Completion) -> list[int]:
    return [*completion.request.prompt, *completion.tokens]


def test_ring_forgets_the_oldest_and_entries_never_overlap():
    rng, ring, expected = random.Random(0), Ring(100), []
    for number in range(1, 400):
        length = rng.choice((1, 5, 20, 60, 99))
        entry = ring.claim(length, 1, number)
        expected.append(entry)
        taken = sorted((e.start, e.start + e.length + 1) for e in ring.entries)
        assert all(a[1] <= b[0] for a, b in zip(taken, taken[1:], strict=False)) and taken[-1][1] <= 100
        assert list(ring.entries) == expected[-len(ring.entries) :], "the newest, without a gap"
        assert entry.number == number and ring.oldest == ring.entries[0].number
    assert ring.claim(100, 1, 0) is None, "with the mark at its end it is longer than the ring"


def test_history_bank_uses_little_space_for_short_responses():
    """The ring holds what its tokens say, whatever the policy's longest position is."""
    history = HistoryDrafter(bank_tokens=16 * 15)
    engine = make_engine(history, max_length=128)
    done = run(engine, prompts(8))
    assert len(history.ring.entries) == 16 and sorted(kept(history)) == sorted(text(c) for c in done)


def test_history_bank_size_follows_the_longest_request():
    sizes = []
    for request_tokens in (0, 20, 64):
        history = HistoryDrafter()
        engine = make_engine(history, request_tokens=request_tokens)
        assert history.index.bank_T.dtype == torch.int32 and len(history.index.bank_T) == history.ring.size
        sizes.append(history.ring.size / (request_tokens or engine.max_length))
    assert sizes == [2048] * 3


def test_evaluations_neither_fill_nor_evict_the_history_bank():
    history = HistoryDrafter(bank_tokens=200)
    engine = make_engine(history)
    run(engine, prompts(6))
    before, table = kept(history), history.index.finished_B.clone()
    assert len(before) == 12
    run(engine, prompts(20, seed=1), samples=3, purpose=Purpose.EVAL, tag=1)
    assert kept(history) == before and torch.equal(history.index.finished_B, table)
    assert not history.running and not history.index.running_B.any(), "nor does it leave anything else behind"
    run(engine, prompts(1, seed=2), tag=2)
    assert kept(history) != before


def test_interrupted_response_is_kept_once():
    """Rows that go back to the queue, for a weight update or for want of blocks, come back with what they
    have.
    """
    history = HistoryDrafter()
    engine = make_engine(history)
    engine.submit(
        [
            Request(str(s), (5, 6, 7), s, SamplingParams(max_tokens=40 if s else 2, ignore_eos=True))
            for s in range(4)
        ]
    )
    done = []
    for completion in engine.completions():
        done.append(completion)
        if len(done) == 1:
            engine.update_weights(1)
    assert engine.preemptions == 3 and sorted(kept(history)) == sorted(text(c) for c in done)


@pytest.mark.parametrize("bank_tokens", [pytest.param(0, marks=pytest.mark.slow), 150])
def test_restored_history_drafter_continues_as_if_uninterrupted(bank_tokens):
    """Also where the bank is full and forgets: the same proposals, and the same memory afterwards."""
    first = HistoryDrafter(bank_tokens)
    engine = make_engine(first)
    for tag in range(3):
        run(engine, prompts(5), tag=tag, tokens=5 + 3 * tag)
    state = engine.drafter_state()
    entries = state["history.entries"]  # those of earlier checkpoints have a fifth column
    state["history.entries"] = torch.cat((entries, torch.ones_like(entries[:, :1])), dim=1)
    second = HistoryDrafter(bank_tokens)
    resumed = make_engine(second)
    resumed.load_drafter_state(state)
    assert kept(first) == kept(second)
    for each in (engine, resumed):
        each.take_stats()
    for tag in range(3, 6):
        assert run(engine, prompts(5), tag=tag) == run(resumed, prompts(5), tag=tag)
        ours, theirs = (each.take_stats().drafts["history"] for each in (engine, resumed))
        assert ours == theirs and ours.proposed > 0
        assert kept(first) == kept(second)


def test_smaller_history_bank_keeps_the_newest():
    first, second = HistoryDrafter(400), HistoryDrafter(80)
    engine = make_engine(first)
    run(engine, prompts(8))
    smaller = make_engine(second)
    smaller.load_drafter_state(engine.drafter_state())
    assert 0 < len(kept(second)) < 8 and kept(second) == kept(first)[-len(kept(second)) :]


def test_history_checkpoint_of_the_earlier_layout_is_refused_harmlessly():
    history = HistoryDrafter()
    engine = make_engine(history)
    run(engine, prompts(3))
    earlier = {
        "tokens": torch.zeros(16, 60, dtype=torch.int64),
        "length": torch.zeros(16, dtype=torch.int64),
        "prompt_length": torch.zeros(16, dtype=torch.int64),
        "order": torch.tensor([0]),
        "next_entry": torch.tensor(1),
    }
    with pytest.warns(UserWarning, match="earlier layout"):
        engine.load_drafter_state({f"history.{name}": tensor for name, tensor in earlier.items()})
    assert kept(history) == [] and not history.index.finished_B.any()
    assert len(run(engine, prompts(3), tag=1)) == 6 and len(kept(history)) == 6
