"""Thousands of requests of random shapes through a small pool: every one ends exactly once, every block comes
back.
"""

import random

import pytest
import torch

from paceline.drafting.history import HistoryDrafter
from paceline.engine.engine import Engine, EngineSettings
from paceline.pacing.strategy import PLAIN, Decision, Moment, Observation, Strategy
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.types import FinishReason, Request, SamplingParams

CONFIG = DecoderConfig("llama", 40, 16, 16, 1, 2, 1, 8, 128, eos_token_ids=(2,))


class RandomPacer:
    """A different strategy at every step."""

    def __init__(self) -> None:
        self.rng = random.Random(1)

    def choose(self, moment: Moment) -> Decision:
        return Decision(
            self.rng.choice((PLAIN, Strategy("history", 1), Strategy("history", 4), Strategy("history", 15)))
        )

    def observe(self, observation: Observation) -> None:
        pass


def make_requests(rng: random.Random, count: int) -> list[Request]:
    requests: list[Request] = []
    while len(requests) < count:
        prompt = tuple(rng.randrange(3, 40) for _ in range(rng.choice((1, 2, 16, 17, 31, 60, 127, 128))))
        for _ in range(rng.choice((1, 1, 4, 8))):
            sampling = SamplingParams(
                rng.choice((0.0, 1.0)),
                rng.choice((1, 3, 20, 90)),
                rng.choice((1.0, 0.8)),
                ignore_eos=rng.random() < 0.3,
            )
            requests.append(
                Request(f"r{len(requests)}", prompt, len(requests), sampling, hold=rng.random() < 0.1)
            )
    return requests[:count]


def soak(count: int) -> None:
    rng = random.Random(0)
    policy = Decoder(CONFIG).initialise(0)
    settings = EngineSettings(max_running=16, kv_tokens=448, prefill_tokens=48)
    engine = Engine(policy, settings, drafters=[HistoryDrafter(bank_tokens=1920)], pacer=RandomPacer())
    requests = make_requests(rng, count)
    waiting = list(requests)
    seen: dict[str, FinishReason] = {}
    while waiting or len(seen) < count:
        engine.submit(waiting[:100])
        del waiting[:100]
        for completion in engine.completions():
            assert completion.request.id not in seen, "ended twice"
            seen[completion.request.id] = completion.finish_reason
            action = rng.random()
            if action < 0.03:
                engine.abort([rng.choice(requests).id])
            elif action < 0.04:
                engine.update_weights(engine.version + 1)
            elif action < 0.05:
                engine.pause()
        engine.resume()
    engine.scheduler.drop_held(list(engine.scheduler.held))
    assert (
        engine.pool.used == 0 and engine.scheduler.idle and not engine.running and not engine.scheduler.shared
    )
    assert sorted(engine.scheduler.free_slots) == list(range(16))
    expected = {FinishReason.STOP, FinishReason.LENGTH, FinishReason.REFUSED}
    if count > 1000:  # of fewer, chance decides whether one is aborted
        expected.add(FinishReason.ABORTED)
    assert expected <= set(seen.values())
    assert engine.preemptions > count / 50
    assert all(torch.isfinite(storage.tensor).all() for storage in engine.cache.storages.values())


@pytest.mark.slow
def test_engine_soak_of_hundreds_of_requests_loses_none():
    soak(200)


@pytest.mark.slow
def test_engine_soak_of_thousands_of_requests_loses_none():
    soak(5000)
