"""Recorded routing on a GPU: under graphs, speculation and sleep it is the same, and the learner's routers
mostly agree with it.
"""

import pytest
import torch

from paceline.drafting.history import HistoryDrafter
from paceline.engine.engine import Engine, EngineSettings
from paceline.learning.batch import pack, training_sequence
from paceline.learning.logprobs import token_logprobs
from paceline.pacing.strategy import PLAIN, FixedPacer, Strategy
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from tests.engine.test_engine_gpu import bits, make_requests, run

pytestmark = pytest.mark.gpu
CONFIG = DecoderConfig(
    "qwen3_moe",
    2048,
    512,
    1024,
    4,
    8,
    2,
    64,
    2048,
    qk_norm=True,
    eos_token_ids=(2,),
    num_experts=16,
    num_experts_per_token=4,
    expert_intermediate_size=256,
    normalise_expert_weights=True,
    dense_layers=(1,),
)


def make_engine(policy: Decoder, strategy: Strategy = PLAIN, **settings) -> Engine:
    settings = EngineSettings(
        **{"max_running": 32, "kv_tokens": 32768, "deterministic": True, "records_routing": True, **settings}
    )
    return Engine(policy, settings, drafters=[HistoryDrafter()], pacer=FixedPacer(strategy, 1000))


def test_routing_is_recorded_under_graphs():
    policy = Decoder(CONFIG, torch.bfloat16, "cuda").initialise(0)
    requests = make_requests(48)
    plain = run(make_engine(policy), requests)
    routing = {name: completion.routing for name, completion in plain.items()}
    engines = [
        make_engine(policy, max_running=1),
        make_engine(policy, kv_tokens=1024),
        make_engine(policy, Strategy("history", 5)),
    ]
    for engine in [*engines, engines[-1]]:  # the last one a second time, after it slept
        done = run(engine, requests)
        assert bits(done) == bits(plain)
        assert {name: completion.routing for name, completion in done.items()} == routing
        engine.sleep()
        engine.wake()
    batch = pack([training_sequence(completion) for completion in plain.values()], policy.device)
    with torch.no_grad():
        difference_R = (token_logprobs(policy, batch)[0] - batch.rollout_logprobs_R).abs()
    assert batch.replay.rerouted / batch.replay.routed < 0.05
    assert difference_R.mean() < 0.02, difference_R.mean()
