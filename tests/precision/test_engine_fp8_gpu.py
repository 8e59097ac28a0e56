"""FP8 on a GPU: deterministic bits, graphs that follow weight updates and fall back, agreement with the
learner.
"""

import pytest
import torch

from paceline.engine.engine import Engine, EngineSettings
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from tests.engine.test_engine_gpu import bits, make_requests, run

pytestmark = pytest.mark.gpu
CONFIG = DecoderConfig("qwen3", 2048, 512, 1024, 4, 8, 2, 64, 2048, qk_norm=True, eos_token_ids=(2,))
EXPERTS = DecoderConfig(
    "qwen3_moe",
    2048,
    512,
    1024,
    3,
    8,
    2,
    64,
    2048,
    qk_norm=True,
    eos_token_ids=(2,),
    num_experts=16,
    num_experts_per_token=4,
    expert_intermediate_size=256,
)


def make_engine(policy: Decoder, **settings) -> Engine:
    return Engine(
        policy,
        EngineSettings(
            **{
                "max_running": 32,
                "kv_tokens": 32768,
                "deterministic": True,
                "precision": "fp8+kv",
                **settings,
            }
        ),
    )


@pytest.mark.parametrize(
    ("config", "precision"), [(CONFIG, "fp8+kv"), (EXPERTS, "fp8+kv"), (CONFIG, "kv"), (EXPERTS, "kv")]
)
def test_deterministic_fp8_bits_depend_on_nothing_but_the_request(config, precision):
    policy = Decoder(config, torch.bfloat16, "cuda").initialise(0)
    requests = make_requests(32)
    expected = bits(run(make_engine(policy, max_running=1, precision=precision), requests))
    assert bits(run(make_engine(policy, precision=precision), requests)) == expected
    cramped = make_engine(policy, kv_tokens=1024, prefill_tokens=64, precision=precision)
    assert bits(run(cramped, requests)) == expected and cramped.preemptions > 0


def test_weight_updates_and_fall_back_reach_captured_graphs():
    policy = Decoder(CONFIG, torch.bfloat16, "cuda").initialise(0)
    requests = make_requests(12, longest=60)
    engine = make_engine(policy)
    first = bits(run(engine, requests))
    scales = engine.calibration_state()
    with torch.no_grad():
        for layer in policy.layers:
            layer.attention.qkv.weight.mul_(1.3)
    engine.update_weights(1)
    second = bits(run(engine, requests))
    fresh = make_engine(policy)
    fresh.load_calibration_state(scales)
    assert second == bits(run(fresh, requests)) and second != first
    engine.fall_back_to_base_precision()
    assert bits(run(engine, requests)) == bits(run(make_engine(policy, precision="bf16"), requests))


def test_engine_and_learner_agree_to_fp8():
    from tests.precision.test_engine_fp8 import logprob_differences

    policy = Decoder(CONFIG, torch.bfloat16, "cuda").initialise(0)
    for precision, least in (("fp8", 1e-3), ("fp8+kv", 1e-3), ("kv", 1e-4)):
        engine = make_engine(policy, precision=precision, deterministic=False)
        differences = logprob_differences(engine, run(engine, make_requests(24, longest=60)))
        assert least < differences.mean() < 0.1, (precision, differences.mean())
