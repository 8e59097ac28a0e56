"""AdamW's state in host memory gives the same bits, in eight bits nearly the same weights; both are saved."""

import pytest
import torch

from paceline.config import LearningConfig, load_config
from paceline.learning import optimiser_state
from paceline.learning.optimiser import MasterAdamW
from paceline.plan.learning import learner_bytes, meta_policy
from paceline.plan.machine import named_gpu
from paceline.plan.plan import make_plan
from paceline.policy.shapes import SHAPES
from tests.plan.shapes import SMALL_SHAPES

Named = list[tuple[str, torch.nn.Parameter]]


def make_parameters(dtype: torch.dtype) -> Named:
    generator = torch.Generator().manual_seed(0)
    shapes = {"large": (40, 60), "small": (5,), "unused": (3, 2)}
    return [
        (name, torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        for name, shape in shapes.items()
    ]


def make_optimiser(named: Named, kind: str) -> MasterAdamW:
    settings = LearningConfig(lr=0.01, weight_decay=0.1, max_grad_norm=5.0, optimiser_state=kind)
    return MasterAdamW(named, settings, 100)


def take_steps(optimiser: MasterAdamW, named: Named, steps: int, seed: int = 1) -> None:
    """Gradients point to zero, with noise."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for name, parameter in named:
            noise = torch.randn(parameter.shape, generator=generator)
            gradient = (parameter.detach().float() + noise).to(parameter.dtype)
            parameter.grad = None if name == "unused" else gradient
        optimiser.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_host_state_gives_the_same_bits(dtype, monkeypatch):
    monkeypatch.setattr(optimiser_state, "PIECE_ELEMENTS", 77)
    results = []
    for kind in ("device", "host"):
        named = make_parameters(dtype)
        optimiser = make_optimiser(named, kind)
        take_steps(optimiser, named, 3)
        results.append([*(p for _, p in named), *optimiser.state().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bit_state_learns_as_float32_does(dtype):
    ends = []
    for kind in ("device", "8bit"):
        named = make_parameters(dtype)
        take_steps(make_optimiser(named, kind), named, 60)
        ends.append(torch.cat([p.detach().flatten().float() for _, p in named]))
    start = torch.cat([p.detach().flatten().float() for _, p in make_parameters(dtype)])
    moved, moved_8bit = (end - start for end in ends)
    assert float((moved_8bit - moved).norm() / moved.norm()) < 0.1
    assert float(ends[1].norm()) < 0.8 * float(start.norm())


def test_eight_bit_state_repeats_and_resumes_bit_for_bit():
    """The same bits again, and the same ones from a saved state."""
    ends = []
    for saved in (False, False, True):
        named = make_parameters(torch.bfloat16)
        optimiser = make_optimiser(named, "8bit")
        take_steps(optimiser, named, 2)
        if saved:
            state = {name: tensor.clone() for name, tensor in optimiser.state().items()}
            optimiser = make_optimiser(named, "8bit")
            optimiser.load_state(state, steps=2)
        take_steps(optimiser, named, 2, seed=2)
        ends.append([p.detach().clone() for _, p in named])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*ends, strict=True))


@pytest.mark.slow
def test_plan_accounts_for_every_optimiser_state():
    shape = SMALL_SHAPES["qwen3"]
    found = {}
    for kind in ("device", "8bit", "host"):
        config = load_config(None, [f"learning.optimiser_state={kind}"])
        found[kind] = learner_bytes(meta_policy(shape, config, torch.bfloat16), config, 64)
    parameters = shape.num_parameters
    assert found["device"].masters == found["8bit"].masters == 4 * parameters
    assert found["device"].moments == 8 * parameters
    # A parameter is filled up to whole groups.
    assert 2 * parameters * (1 + 4 / 128) <= found["8bit"].moments <= 2.2 * parameters
    assert found["host"].masters == found["host"].moments == 0 < found["host"].staging


@pytest.mark.slow
@pytest.mark.parametrize("kind, fits", [("device", False), ("8bit", True), ("host", True)])
def test_plan_reports_which_optimiser_state_fits_a_card_of_24_gb(kind, fits):
    """Qwen3-1.7B in full."""
    config = load_config(None, [f"learning.optimiser_state={kind}"])
    plan = make_plan(config, SHAPES["qwen3-1.7b"], torch.bfloat16, named_gpu("RTX-4090"))
    assert (not plan.problem) == fits, plan.problem
