"""Muon's step of a matrix, against singular vectors that a decomposition gives."""

import math

import pytest
import torch

from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.drafting.training import MATRIX_RATE, VOCABULARY, HeadOptimiser, HeadTraining
from paceline.kernels.adamw import AdamWStep
from paceline.learning.muon import ADAMW_SIZE, MOMENTUM, MuonState, orthogonalised
from paceline.learning.optimiser_state import DeviceState
from paceline.policy.shapes import SHAPES

ONE = torch.ones(())


def step(number: int = 1, learning_rate: float = 0.1, weight_decay: float = 0.0) -> AdamWStep:
    return AdamWStep(number, learning_rate, 0.9, 0.98, weight_decay)


@pytest.mark.parametrize("shape", [(48, 48), (96, 24), (24, 96), (1, 7)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_muon_gives_all_directions_about_the_same_size(shape, scale):
    """Those that are a thousandth of the largest, too; singular vectors stay."""
    generator = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    matrix = scale * (u * torch.logspace(0, -3, u.shape[1])) @ v
    made = orthogonalised(matrix)
    sizes = torch.linalg.svdvals(made)
    assert sizes.max() < 1.3
    assert sizes.min() > (0.6 if min(shape) == 1 else 0.2), "ten times as large relative to the largest"
    inner = u.T @ made @ v.T
    assert (inner - inner.diagonal().diag()).abs().max() < 1e-3


def test_muon_keeps_a_matrix_of_zeros():
    assert not orthogonalised(torch.zeros(4, 6)).any()


def test_muon_step_does_not_depend_on_the_size_of_gradients():
    generator = torch.Generator().manual_seed(0)
    start, gradient = torch.randn(2, 32, 16, generator=generator)
    results = []
    for scale in (1.0, 1e-3):
        weight = start.clone()
        MuonState(weight).step(weight, gradient, scale * ONE, step())
        results.append(weight)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    moved = (results[0] - start).pow(2).mean().sqrt()
    # An orthogonal 32 x 16 matrix has a root mean square of sqrt(16 / 512), times sqrt(32).
    assert float(moved) == pytest.approx(0.1 * ADAMW_SIZE, rel=0.3)


def test_muon_momentum_is_nesterovs_and_weights_decay():
    generator = torch.Generator().manual_seed(1)
    start, first, second = torch.randn(3, 8, 12, generator=generator)
    weight = start.clone()
    state = MuonState(weight, rate=2.0)
    for number, gradient in enumerate((first, second), 1):
        state.step(weight, gradient, ONE, step(number, learning_rate=0.05, weight_decay=0.1))
    size = 2.0 * 0.05 * ADAMW_SIZE * math.sqrt(12)
    keep = 1 - 2.0 * 0.05 * 0.1
    expected = keep * start - size * orthogonalised((1 + MOMENTUM) * first)
    momentum = MOMENTUM * first + second
    expected = keep * expected - size * orthogonalised(second + MOMENTUM * momentum)
    torch.testing.assert_close(weight, expected)
    assert weight is not state.master and weight.data_ptr() == state.master.data_ptr(), "its own master"
    torch.testing.assert_close(state.moments()["momentum"], momentum)


def test_muon_master_accumulates_small_steps_of_bf16_weights():
    start = torch.ones(4, 4, dtype=torch.bfloat16)
    weight = start.clone()
    state = MuonState(weight)
    gradient = torch.eye(4, dtype=torch.bfloat16)
    for number in range(1, 33):
        state.step(weight, gradient, ONE, step(number, learning_rate=1e-3))
    assert torch.equal(weight, state.master.bfloat16()) and not torch.equal(weight, start)
    state.step(weight, None, ONE, step(33, learning_rate=1e-3))
    assert torch.equal(weight, state.master.bfloat16()), "without a gradient, by its momentum"


def test_head_optimiser_uses_muon_for_the_layer_and_adamw_for_the_rest():
    head = EagleHead(config_for(SHAPES["smollm2-135m"], (1, 2, 3), 64), device="meta")
    optimiser = HeadOptimiser(head.named_parameters(), HeadTraining().optimiser(), 1)
    for (name, parameter), state in zip(optimiser.named, optimiser.states, strict=True):
        if parameter.ndim == 2 and name != VOCABULARY:
            assert isinstance(state, MuonState) and state.rate == MATRIX_RATE
        else:
            assert isinstance(state, DeviceState)
    assert VOCABULARY in dict(optimiser.named)
