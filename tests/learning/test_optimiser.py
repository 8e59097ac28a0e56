"""MasterAdamW is AdamW, on float32 masters, with the schedules it names."""

import math

import pytest
import torch

from paceline.config import LearningConfig
from paceline.learning.optimiser import MasterAdamW


def test_master_adamw_equals_torch_adamw():
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(4))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    settings = LearningConfig(lr=0.01, weight_decay=0.1, max_grad_norm=0.5)
    optimiser = MasterAdamW([("a", ours[0]), ("b", ours[1])], settings, 10)
    groups = [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}]
    oracle = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.99), eps=1e-8)
    for _ in range(7):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        oracle.step()
        assert optimiser.step() == pytest.approx(norm.item(), rel=1e-6)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_master_adamw_carries_small_steps_to_a_bf16_weight():
    """A thousand steps of 1e-5 move a bf16 weight of 1.0 by 0.01, although one of them rounds to nothing."""
    weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    storage = weight.data_ptr()
    optimiser = MasterAdamW([("w", weight)], LearningConfig(lr=1e-5), 1000)
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        optimiser.step()
    assert weight[0, 0].item() == pytest.approx(0.99, abs=0.004)
    assert weight.data_ptr() == storage, "an engine reads this storage"


@pytest.mark.parametrize(
    "schedule, expected", [("constant", [0.5, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.75, 0.5])]
)
def test_learning_rate_follows_each_schedule(schedule, expected):
    weight = torch.nn.Parameter(torch.ones(1))
    optimiser = MasterAdamW([("w", weight)], LearningConfig(lr=1.0, lr_schedule=schedule, warmup_steps=2), 6)
    rates = []
    for _ in expected:
        rates.append(optimiser.learning_rate)
        weight.grad = torch.ones(1)
        optimiser.step()
    assert rates == pytest.approx(expected)


def test_cosine_schedule_ends_at_zero():
    optimiser = MasterAdamW(
        [("w", torch.nn.Parameter(torch.ones(1)))], LearningConfig(lr=2.0, lr_schedule="cosine"), 8
    )
    optimiser.steps = 4
    assert optimiser.learning_rate == pytest.approx(1 + math.cos(math.pi / 2))
    optimiser.steps = 8
    assert optimiser.learning_rate == pytest.approx(0)
