"""The engine on a GPU: deterministic bits, graphs that outlive sleep, agreement with the learner."""

import random

import pytest
import torch

from paceline.engine.engine import Engine, EngineSettings
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.gpu
CONFIG = DecoderConfig("qwen3", 2048, 512, 1024, 4, 8, 2, 64, 2048, qk_norm=True, eos_token_ids=(2,))


@pytest.fixture(scope="module")
def policy() -> Decoder:
    return Decoder(CONFIG, torch.bfloat16, "cuda").initialise(0)


def make_engine(policy: Decoder, **settings) -> Engine:
    return Engine(
        policy, EngineSettings(**{"max_running": 32, "kv_tokens": 32768, "deterministic": True, **settings})
    )


def make_requests(count: int, longest: int = 200) -> list[Request]:
    rng = random.Random(0)
    requests = []
    for i in range(count):
        prompt = (
            tuple(rng.randrange(3, 2048) for _ in range(rng.choice((1, 15, 16, 17, 100, 300))))
            if i % 4 == 0
            else requests[-1].prompt
        )
        requests.append(
            Request(str(i), prompt, rng.getrandbits(62), SamplingParams(max_tokens=rng.randint(1, longest)))
        )
    return requests


def run(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    engine.submit(requests)
    done = {c.request.id: c for c in engine.completions()}
    assert len(done) == len(requests) and engine.pool.used == 0
    return done


def bits(done: dict[str, Completion]) -> dict[str, tuple]:
    return {name: (c.tokens, c.logprobs, c.finish_reason) for name, c in done.items()}


def test_deterministic_engine_bits_depend_on_nothing_but_the_request(policy):
    requests = make_requests(48)
    expected = bits(run(make_engine(policy, max_running=1), requests))
    assert bits(run(make_engine(policy), requests)) == expected
    assert (
        bits(
            run(make_engine(policy, max_running=48, prefill_tokens=64), random.Random(1).sample(requests, 48))
        )
        == expected
    )
    cramped = make_engine(policy, kv_tokens=1024)
    assert bits(run(cramped, requests)) == expected
    assert cramped.preemptions > 0


def test_graphs_replay_after_sleep_and_wake(policy):
    engine = make_engine(policy, kv_tokens=1 << 20)
    requests = make_requests(16)
    expected = bits(run(engine, requests))
    captured = dict(engine.runner.captured)
    before = torch.cuda.mem_get_info()[0]
    engine.sleep()
    given_back = torch.cuda.mem_get_info()[0] - before
    assert given_back > 0.9 * engine.cache.num_bytes
    other = torch.full((given_back // 2,), 7, dtype=torch.uint8, device="cuda")
    del other
    torch.cuda.empty_cache()
    engine.wake()
    assert bits(run(engine, requests)) == expected
    assert engine.runner.captured == captured, "the same graphs served again"


def test_engine_logprobs_agree_with_the_learner(policy):
    from paceline.learning.batch import TrainingSequence, micro_batches
    from paceline.learning.logprobs import token_logprobs

    done = run(make_engine(policy, deterministic=False), make_requests(32))
    differences = []
    for completion in done.values():
        prompt, count = completion.request.prompt, len(completion.tokens)
        sequence = TrainingSequence(
            prompt + completion.tokens, len(prompt), (True,) * count, completion.logprobs, 1.0, 1.0
        )
        (batch,) = micro_batches([sequence], 4096, policy.device)
        with torch.no_grad():
            differences.append((token_logprobs(policy, batch)[0] - batch.rollout_logprobs_R).abs())
    difference = torch.cat(differences)
    assert difference.mean() < 0.02 and difference.max() < 0.2, (difference.mean(), difference.max())


def test_fast_mode_samples_mostly_the_same(policy):
    requests = make_requests(48, longest=100)
    one, many = (run(make_engine(policy, deterministic=False, max_running=n), requests) for n in (1, 48))
    same = sum(one[name].tokens == many[name].tokens for name in one) / len(one)
    assert same > 0.5, f"only {same:.2f} of the completions are identical in the fast mode"
