"""FP8 learning: the rollout's own quantisation forward, FP8 gradients within their rounding."""

import pytest
import torch

from paceline.config import ConfigError
from paceline.kernels.fp8_quantise import quantise_rows
from paceline.learning.learner import Learner
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.products import Fp8Product, quantised
from paceline.precision.products import use_fp8
from tests.learning.samples import make_config
from tests.learning.test_fused import MARKED_CASES, SHAPES, make_policy, results

LARGE = DecoderConfig("qwen3", 50, 256, 384, 2, 4, 2, 64, 64, qk_norm=True)


def relative(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours.double() - expected.double()).norm() / expected.double().norm())


def test_fp8_product_is_that_of_the_quantised_numbers():
    """Both directions, against float64 products of what the formats stand for; sizes are no whole blocks."""
    torch.manual_seed(0)
    x_TI, weight_OI, d_TO = torch.randn(7, 200), torch.randn(300, 200), torch.randn(7, 300)
    rounded_OI = quantised(weight_OI).dequantise()[:, :200].double()
    x, d = (quantise_rows(rows).dequantise().double() for rows in (x_TI, d_TO))
    product = Fp8Product()
    assert relative(product.forward(x_TI, weight_OI, None), x[:, :200] @ rounded_OI.t()) < 1e-6
    assert relative(product.backward(d_TO, weight_OI), d[:, :300] @ rounded_OI) < 1e-6
    assert 0.005 < relative(product.forward(x_TI, weight_OI, None), x_TI @ weight_OI.t()) < 0.06


@pytest.mark.parametrize("family, lora", MARKED_CASES)
def test_fp8_gradients_are_near_the_exact_ones(family, lora):
    """E4M3 keeps three bits of a fraction: single numbers are off by up to 6%."""
    oracle = results(make_policy(family, lora, torch.float64))
    policy = make_policy(family, lora, torch.float32)
    use_fp8(policy)
    ours = results(policy)
    assert ours.keys() == oracle.keys()
    stack = [torch.cat([found[name].flatten() for name in oracle if "." in name]) for found in (ours, oracle)]
    assert 0.001 < relative(*stack) < (0.5 if family == "qwen3_moe" else 0.15)


def test_outermost_layers_can_keep_their_type():
    policy = Decoder(SHAPES["llama"])
    with pytest.raises(ValueError, match="base_precision_layers"):
        use_fp8(policy, base_layers=1)
    shape = DecoderConfig("llama", 50, 32, 48, 3, 4, 2, 8, 64)
    policy = Decoder(shape)
    use_fp8(policy, base_layers=1)
    assert [layer.attention.qkv.product is not None for layer in policy.layers] == [False, True, False]


def test_fp8_learning_is_switched_on_by_a_recipe():
    learner = Learner(Decoder(LARGE).initialise(0), make_config("learning.precision=fp8"))
    assert isinstance(learner.policy.layers[0].feed_forward.down.product, Fp8Product)


def test_exact_learning_in_fp8_wants_fp8_rollouts():
    assert make_config("learning.precision=fp8", "rollout.precision=fp8", "learning.numerics=exact")
    with pytest.raises(ConfigError, match=r"set rollout\.precision=fp8 or leave learning\.precision out"):
        make_config("learning.precision=fp8", "learning.numerics=exact")
