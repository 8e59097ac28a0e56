"""Drafters on a GPU: in deterministic mode completions are plain decoding's bits, whatever proposes and
whenever that changes.
"""

import random

import pytest
import torch

from paceline.drafting.draft_model import DraftModel
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.drafting.history import HistoryDrafter
from paceline.engine.engine import Engine, EngineSettings
from paceline.pacing.strategy import PLAIN, FixedPacer, Strategy
from paceline.policy.decoder import Decoder
from tests.drafting.heads import random_head
from tests.engine.test_engine_gpu import CONFIG, bits, make_requests, run

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def policy() -> Decoder:
    return Decoder(CONFIG, torch.bfloat16, "cuda").initialise(0)


def make_engine(policy: Decoder, fp8_head: bool = False, **settings) -> Engine:
    off = Decoder(CONFIG, torch.bfloat16, "cuda").initialise(0)
    with torch.no_grad():
        off.head.weight.add_(torch.randn_like(off.head.weight) * 0.005)  # right often, not always
    head = EagleHead(config_for(CONFIG, captured_layers=(1, 2, 3), draft_vocab=512), torch.bfloat16, "cuda")
    random_head(head, policy, 1)
    drafters = [HistoryDrafter(), DraftModel(off), EagleDrafter(head, fp8=fp8_head)]
    return Engine(
        policy,
        EngineSettings(**{"max_running": 32, "kv_tokens": 32768, "deterministic": True, **settings}),
        drafters=drafters,
    )


@pytest.mark.parametrize("name", ["history", "draft_model", "eagle"])
def test_drafters_give_the_bits_of_plain_decoding_on_a_gpu(policy, name):
    requests = make_requests(40)
    expected = bits(
        run(Engine(policy, EngineSettings(max_running=1, kv_tokens=32768, deterministic=True)), requests)
    )
    for count in (1, 5):
        engine = make_engine(policy)
        engine.pacer = FixedPacer(Strategy(name, count), 1000)
        assert bits(run(engine, requests)) == expected, count
        stats = engine.take_stats().drafts[name]
        assert stats.drafts > 0
        if name == "draft_model":
            assert stats.accept_length > 1.3, stats.accept_length


@pytest.mark.parametrize("tree", [False, True])
def test_fp8_head_drafts_and_changes_no_bit(policy, tree):
    requests = make_requests(40)
    alone = EngineSettings(max_running=1, kv_tokens=32768, deterministic=True)
    expected = bits(run(Engine(policy, alone), requests))
    accepted = {}
    for fp8_head in (False, True):
        engine = make_engine(policy, fp8_head, trees=tree)
        engine.pacer = FixedPacer(Strategy("eagle", 5, tree), 1000)
        assert bits(run(engine, requests)) == expected
        accepted[fp8_head] = engine.take_stats().drafts["eagle"].accept_length
    assert abs(accepted[True] - accepted[False]) < 0.1, accepted


def test_drafters_keep_bits_when_the_strategy_changes_and_rows_are_preempted(policy):
    requests = make_requests(40)
    expected = bits(
        run(Engine(policy, EngineSettings(max_running=1, kv_tokens=32768, deterministic=True)), requests)
    )
    engine, rng, done = make_engine(policy, kv_tokens=2048), random.Random(1), {}
    choices = [
        PLAIN,
        *(Strategy(name, count) for name in ("history", "draft_model", "eagle") for count in (2, 7)),
    ]
    engine.pacer = FixedPacer(choices[-1], 1000)
    engine.submit(requests)
    for completion in engine.completions():
        done[completion.request.id] = completion
        engine.pacer = FixedPacer(rng.choice(choices), 1000)
    assert bits(done) == expected and engine.preemptions > 0


def test_drafters_survive_sleep(policy):
    engine = make_engine(policy)
    engine.pacer = FixedPacer(Strategy("draft_model", 3), 1000)
    requests = make_requests(16)
    expected = bits(run(engine, requests))
    before = engine.take_stats().drafts["draft_model"].accept_length
    engine.sleep()
    torch.empty(1 << 28, device="cuda").fill_(7)
    engine.wake()
    assert bits(run(engine, requests)) == expected
    assert engine.take_stats().drafts["draft_model"].accept_length == pytest.approx(before, abs=0.3)
