"""MasterAdamW is AdamW, on float32 masters, with the schedules it names."""

import math

import pytest
import torch

from paceline.config import LearningConfig
from paceline.learning import optimiser as optimiser_module
from paceline.learning.optimiser import MasterAdamW, cut_into_pieces
from paceline.plan.memory_tracker import MemoryTracker


def test_equals_torch_adamw():
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


def test_small_steps_reach_a_bf16_weight():
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
def test_schedules(schedule, expected):
    weight = torch.nn.Parameter(torch.ones(1))
    optimiser = MasterAdamW([("w", weight)], LearningConfig(lr=1.0, lr_schedule=schedule, warmup_steps=2), 6)
    rates = []
    for _ in expected:
        rates.append(optimiser.learning_rate)
        weight.grad = torch.ones(1)
        optimiser.step()
    assert rates == pytest.approx(expected)


def test_cosine_ends_at_zero():
    optimiser = MasterAdamW(
        [("w", torch.nn.Parameter(torch.ones(1)))], LearningConfig(lr=2.0, lr_schedule="cosine"), 8
    )
    optimiser.steps = 4
    assert optimiser.learning_rate == pytest.approx(1 + math.cos(math.pi / 2))
    optimiser.steps = 8
    assert optimiser.learning_rate == pytest.approx(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_change_nothing_but_memory(dtype, monkeypatch):
    """Pieces of seven elements give the same bits as all at once, and need far less memory."""
    results = []
    peaks = []
    for limit in (1 << 20, 7):
        monkeypatch.setattr(optimiser_module, "PIECE_ELEMENTS", limit)
        generator = torch.Generator().manual_seed(0)
        shapes = {"large": (40, 60), "small": (5,), "tiny": (1,), "unused": (3, 2)}
        named = [
            (name, torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
            for name, shape in shapes.items()
        ]
        optimiser = MasterAdamW(named, LearningConfig(lr=0.01, weight_decay=0.1, max_grad_norm=0.5), 10)
        for _ in range(3):
            for name, parameter in named:
                parameter.grad = (
                    None if name == "unused" else torch.randn(parameter.shape, generator=generator).to(dtype)
                )
            known = [
                *(p for _, p in named),
                *(p.grad for _, p in named if p.grad is not None),
                *optimiser.state().values(),
            ]
            with MemoryTracker([*known, *optimiser.masters]) as memory:
                optimiser.step()
        results.append([*(p for _, p in named), *optimiser.state().values()])
        peaks.append(memory.peak)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert peaks[0] > 2400 * 4 and peaks[1] < 1000


def test_pieces_cover_everything_once():
    groups = cut_into_pieces([10, 0, 3, 25, 1], 8)
    assert [sum(p.stop - p.start for p in group) for group in groups] == [8, 8, 8, 8, 7]
    covered = [(p.index, i) for group in groups for p in group for i in range(p.start, p.stop)]
    assert covered == [(index, i) for index, size in enumerate([10, 0, 3, 25, 1]) for i in range(size)]
