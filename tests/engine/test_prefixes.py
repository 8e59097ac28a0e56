"""Prompts that begin as earlier texts did start from what those left in the cache, with the same bits."""

import random

import pytest
import torch

from paceline.engine.blocks import BlockPool
from paceline.engine.engine import Engine
from paceline.engine.settings import EngineSettings
from paceline.paged.cache import BLOCK_SIZE
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.types import Completion, Purpose, Request, SamplingParams

CONFIG = DecoderConfig("llama", 60, 32, 32, 2, 2, 1, 16, 512, eos_token_ids=(2,))


@pytest.fixture(scope="module")
def policy() -> Decoder:
    return Decoder(CONFIG).initialise(0)


def make_engine(policy: Decoder, **settings) -> Engine:
    return Engine(policy, EngineSettings(**{"max_running": 8, "kv_tokens": 2048, **settings}))


def bits(completion: Completion) -> tuple:
    return completion.tokens, completion.logprobs, completion.finish_reason


def chat(rng: random.Random, number: int, turns: int) -> list[list[int]]:
    """Returns what a user adds to a conversation, turn by turn; conversations begin alike."""
    shared = random.Random(number % 3)
    begin = [shared.randrange(3, 60) for _ in range(70)]
    return [begin, *([rng.randrange(3, 60) for _ in range(rng.randint(1, 30))] for _ in range(turns - 1))]


def converse(engine: Engine, seed: int) -> dict[str, Completion]:
    """Runs conversations side by side, each turn behind the last one's answer; some requests are aborted."""
    rng = random.Random(seed)
    chats = {f"chat{n}": chat(rng, n, turns=4) for n in range(12)}
    text = {name: turns.pop(0) for name, turns in chats.items()}
    done: dict[str, Completion] = {}

    def next_turn(name: str) -> None:
        number = 4 - len(chats[name])
        sampling = SamplingParams(max_tokens=rng.randint(1, 40))
        samples = 1 + (name == "chat5")
        requests = [
            Request(f"{name}/{number}/{s}", tuple(text[name]), number * 7 + s, sampling, scope=name[:4])
            for s in range(samples)
        ]
        engine.submit(requests)
        if rng.random() < 0.2:
            engine.submit([Request(f"gone{name}{number}", tuple(text[name]), 1, sampling)])
            engine.abort([f"gone{name}{number}"])

    for name in chats:
        next_turn(name)
    for completion in engine.completions():
        name, _, sample = completion.request.id.partition("/")
        if name.startswith("gone"):
            continue
        done[completion.request.id] = completion
        if sample.endswith("/0") and chats[name]:
            text[name] = [*completion.request.prompt, *completion.tokens, *chats[name].pop(0)]
            next_turn(name)
    assert engine.pool.used == 0
    return done


@pytest.mark.parametrize("kv_tokens", [4096, 1024])
def test_prefix_of_earlier_requests_saves_prefill_and_changes_no_bit(policy, kv_tokens):
    """With room for everything, and with a pool in which prefixes are dropped and rows are preempted."""
    plain = make_engine(policy, kv_tokens=4096)
    expected = converse(plain, seed=1)
    engine = make_engine(policy, kv_tokens=kv_tokens, keeps_prefixes=True)
    told = converse(engine, seed=1)
    assert {name: bits(c) for name, c in told.items()} == {name: bits(c) for name, c in expected.items()}
    assert all(c.reused_tokens == 0 for c in expected.values())
    if kv_tokens == 4096:
        for name, completion in told.items():
            chat_name, turn, sample = name.split("/")
            if turn != "1" and sample == "0":
                before = told[f"{chat_name}/{int(turn) - 1}/0"]
                known = len(before.request.prompt) + len(before.tokens) - 1
                assert completion.reused_tokens == known // BLOCK_SIZE * BLOCK_SIZE
        assert engine.take_stats().prefill_tokens < plain.take_stats().prefill_tokens / 3


def test_prefix_belongs_to_its_scope(policy):
    engine = make_engine(policy, keeps_prefixes=True)
    prompt = tuple(range(3, 53))
    reused = []
    for number, scope in enumerate(("a", "a", "b", "a")):
        engine.submit([Request(str(number), prompt, 1, SamplingParams(max_tokens=3), scope=scope)])
        (completion,) = engine.completions()
        reused.append(completion.reused_tokens)
    assert reused == [0, 48, 0, 48]


def test_prefix_is_dropped_with_the_weights_that_made_it(policy):
    engine = make_engine(policy, keeps_prefixes=True)
    request = Request("0", tuple(range(3, 53)), 1, SamplingParams(max_tokens=8), purpose=Purpose.TRAIN)
    engine.submit([request])
    (first,) = engine.completions()
    changed = {name: tensor * 1.5 for name, tensor in policy.state_dict().items()}
    kept = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    try:
        policy.load_state_dict(changed)
        engine.update_weights(1)
        engine.submit([request])
        (second,) = engine.completions()
        alone = make_engine(policy)
        alone.submit([request])
        (expected,) = alone.completions()
        assert second.reused_tokens == 0 and bits(second) == bits(expected)
        assert second.logprobs != first.logprobs
    finally:
        with torch.no_grad():
            policy.load_state_dict(kept)


def test_pool_hands_out_the_prefix_unused_for_longest_first():
    pool = BlockPool(7)
    texts = [list(range(n, n + 2 * BLOCK_SIZE)) for n in (0, 100, 200)]
    for tokens in texts:
        blocks = pool.allocate(2)
        pool.prefixes.add("", tokens, blocks)
        pool.release(blocks)
    assert pool.free == 6 and pool.used == 0
    pool.release(pool.share_prefix("", texts[0]))  # used again: now the second one is the oldest
    pool.release(pool.allocate(1))
    found = [len(pool.prefixes.find("", tokens)) for tokens in texts]
    assert found == [2, 1, 2], "the end of the oldest text goes first"
    pool.release(pool.allocate(3))
    assert [len(pool.prefixes.find("", tokens)) for tokens in texts] == [2, 0, 1]
