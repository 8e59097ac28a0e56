"""KV scales: the formula, who is measured, and what validation refuses."""

import pytest
import torch

from paceline.kernels.attention_reference import attend_reference
from paceline.kernels.attention_shapes import Heads
from paceline.kernels.fp8_format import E4M3
from paceline.kernels.query_tiles import make_tiles
from paceline.kernels.rope_kv import rope_and_write_kv
from paceline.plan.memory_tracker import MemoryTracker
from paceline.policy.config import DecoderConfig
from paceline.precision.kv_scales import MAX_ERROR, KVScales, attention_error

CONFIG = DecoderConfig("qwen3", 97, 48, 80, 3, 6, 2, 16, 256, qk_norm=True)


def observed(per_head: bool = False, batches: int = 5) -> tuple[KVScales, torch.Tensor]:
    torch.manual_seed(0)
    scales = KVScales(CONFIG, torch.device("cpu"), per_head)
    amax = torch.zeros(batches, 3, 2, 2)
    for batch in range(batches):
        for layer in range(3):
            q, k, v = (
                torch.randn(40, 6, 16),
                torch.randn(40, 2, 16) * (layer + 1),
                torch.randn(40, 2, 16) * torch.tensor([1.0, 7.0])[:, None],
            )
            amax[batch, layer, 0], amax[batch, layer, 1] = k.abs().amax((0, 2)), v.abs().amax((0, 2))
            scales.observe(layer, q, k, v)
    return scales, amax


@pytest.mark.parametrize("per_head", [False, True])
def test_kv_scales_follow_the_formula(per_head):
    scales, amax = observed(per_head)
    assert not scales.calibrated and scales.has_measurements
    assert scales.calibrate() == []
    if not per_head:
        amax = amax.amax(-1, keepdim=True).expand_as(amax)
    ordered = amax.sort(dim=0).values  # the 99.9th percentile of five lies between the fourth and the fifth
    expected = (ordered[3] + 0.996 * (ordered[4] - ordered[3])) * 1.05 / 448
    assert torch.equal(scales.scales_L2H, torch.exp2(torch.log2(expected).ceil()))
    assert scales.calibrated and not scales.has_measurements, "an update's measurements are used once"
    assert all(0.005 < error < 0.07 for error in scales.errors), scales.errors


@pytest.mark.parametrize("factor, which", [(1 / 20, 0), (1 / 20, 1), (3e5, 0), (3e5, 1), (float("nan"), 0)])
def test_kv_validation_catches_a_wrong_scale(factor, which):
    """Too small cuts large numbers off, too large loses small ones; a wrong scale in one layer is that
    layer's alone.
    """
    scales, _ = observed()
    keep = list(scales._windows)
    assert scales.calibrate() == []
    scales._windows = keep
    scales.scales_L2H[1, which] *= factor
    assert scales.validate() == [1]
    assert scales.errors[0] < MAX_ERROR and not scales.errors[1] <= MAX_ERROR


def test_kv_validation_catches_outliers_in_a_key_channel():
    """A model without QK-norm whose keys have one huge channel: the rest falls below E4M3's smallest
    number.
    """
    scales = KVScales(CONFIG, torch.device("cpu"))
    torch.manual_seed(0)
    for layer in range(3):
        q, k, v = torch.randn(64, 6, 16), torch.randn(64, 2, 16), torch.randn(64, 2, 16)
        if layer == 2:
            k[:, :, 3] *= 1e6
            q[:, :, 3] = 0.0
        scales.observe(layer, q, k, v)
    assert scales.calibrate() == [2]


def loud(
    tokens: int, keys: float = 1.0, values: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, 6, 16), torch.randn(tokens, 2, 16) * keys, torch.randn(tokens, 2, 16) * values


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_kv_validation_catches_values_drowned_by_another_micro_batch(order):
    scales = KVScales(CONFIG, torch.device("cpu"))
    for layer in range(3):
        batches = loud(1024, values=1e6 if layer == 1 else 1.0), loud(300)
        for which in order:
            scales.observe(layer, *batches[which])
    assert scales.calibrate() == [1]


@pytest.mark.parametrize("where", [slice(0, 256), slice(512, 768), slice(-300, None)])
def test_kv_validation_catches_values_drowned_within_their_micro_batch(where):
    scales = KVScales(CONFIG, torch.device("cpu"))
    for layer in range(3):
        q, k, v = loud(1100)
        if layer == 2:
            v[where] *= 1e6
        scales.observe(layer, q, k, v)
    assert scales.calibrate() == [2]


@pytest.mark.slow
def test_kv_validation_catches_keys_that_the_percentile_cuts_off():
    """One micro-batch of 1,500 has keys a hundred times as large: the 99.9th percentile does not know it."""
    scales = KVScales(CONFIG, torch.device("cpu"))
    for batch in range(1500):
        for layer in range(3):
            scales.observe(layer, *loud(8, keys=100.0 if (batch, layer) == (700, 0) else 1.0))
    assert scales.calibrate() == [0]


def test_kv_validation_measures_the_error_of_the_cache():
    """The error it reports is that of the engine's own kernels: write to the cache, attend from it."""
    torch.manual_seed(1)
    tokens, heads, kv_heads, dim = 48, 6, 2, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    cos, sin = torch.ones(tokens, dim // 2), torch.zeros(tokens, dim // 2)  # no rotation
    q, k, v = qkv.view(tokens, -1, dim).split((heads, kv_heads, kv_heads), 1)
    k_scale, v_scale = k.abs().amax((0, 2)) / 448, v.abs().amax((0, 2)) / 448
    table, position = torch.arange(3).int().view(1, 3), torch.arange(tokens)
    tiles = make_tiles(Heads(3, kv_heads, dim, torch.float32), 16, torch.tensor([tokens]), position, table)
    outs = []
    for dtype, scales in ((torch.float32, (None, None)), (E4M3, (k_scale, v_scale))):
        k_cache, v_cache = (torch.zeros(3, 16, kv_heads, dim, dtype=dtype) for _ in range(2))
        rotated = rope_and_write_kv.reference(
            qkv, position, position, cos, sin, k_cache, v_cache, heads, None, None, 1e-6, *scales
        )
        outs.append(attend_reference(rotated, tiles, k_cache, v_cache, *scales))
    measured = (outs[1] - outs[0]).norm() / outs[0].norm()
    torch.testing.assert_close(attention_error(q, k, v, k_scale, v_scale), measured, rtol=1e-4, atol=0)


def test_kv_calibration_survives_an_aborted_forward_pass():
    """Out of memory in the last layer, then the micro-batch again: the layers before it were measured once
    more.
    """
    torch.manual_seed(0)
    scales = KVScales(CONFIG, torch.device("cpu"))
    q, k, v = torch.randn(40, 6, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    for layer in (0, 1, 0, 1, 2):
        scales.observe(layer, q, k, v)
    assert scales.calibrate() == []
    expected = torch.stack((k.abs().max(), v.abs().max())) * 1.05 / 448
    expected = torch.exp2(torch.log2(expected).ceil())
    assert torch.equal(scales.scales_L2H, expected[None, :, None].expand(3, 2, 2))


def test_kv_calibrated_flag_does_not_touch_the_device():
    """The engine asks before every step, and must not wait for the steps it has launched."""
    scales, _ = observed()
    scales.calibrate()
    with MemoryTracker() as memory:
        assert scales.calibrated
    assert memory.peak == 0, "an operation ran"
