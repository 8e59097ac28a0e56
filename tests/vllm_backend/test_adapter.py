"""What the adapter asks of vLLM without a GPU.

Steps begun ahead, the drafter's own LM head, and hidden states that the drafter writes over.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from paceline.vllm_backend.adapter import VllmEngine
from paceline.vllm_backend.patches import (
    _keep_drafter_head_apart_on_gpu,
    _keep_hidden_states_from_drafter,
)


class Core:
    """vLLM's engine core with a queue of batches: a step begins one, unless paused, and ends the oldest."""

    def __init__(self) -> None:
        self.batch_queue = ["first"]
        self.begun = 1
        self.paused = False

    def pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        assert mode == "keep" and not clear_cache
        self.paused = True

    def resume_scheduler(self) -> None:
        self.paused = False

    def step(self) -> list:
        if not self.paused:
            self.begun += 1
            self.batch_queue.append("another")
        self.batch_queue.pop(0)
        return []


def test_settle_finishes_begun_steps_and_starts_none():
    core = Core()
    engine = VllmEngine.__new__(VllmEngine)
    engine.engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core), step=core.step)
    engine._recorder = None
    engine.step()
    assert len(core.batch_queue) == 1 and core.begun == 2
    assert list(engine.settle()) == [([], None)]
    assert not core.batch_queue and core.begun == 2 and not core.paused
    assert not list(engine.settle())
    core.batch_queue = None  # as where steps do not overlap
    assert not list(engine.settle())


def stand_in(monkeypatch, name: str) -> ModuleType:
    """Returns an empty module that is imported by that name."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    return sys.modules[name]


@pytest.mark.parametrize(
    ("flag", "own", "shares"),
    [
        ("has_own_lm_head", True, False),
        ("has_own_lm_head", False, True),
        ("has_own_embed_tokens", True, True),
    ],
)
def test_drafter_with_an_lm_head_keeps_it_on_a_gpu(monkeypatch, flag, own, shares):
    """vLLM's second model runner shares the policy's where both are equal when they are loaded."""
    utils = SimpleNamespace(_should_share=lambda drafter, flag, mine, theirs: mine == theirs)
    stand_in(monkeypatch, "vllm.v1.worker.gpu.spec_decode.eagle").utils = utils
    _keep_drafter_head_apart_on_gpu()
    assert utils._should_share(SimpleNamespace(**{flag: own}), flag, "equal", "equal") == shares


class StepState(NamedTuple):
    """What vLLM's first model runner keeps between the policy's step and sampling, in part."""

    logits: torch.Tensor
    hidden_states: torch.Tensor


class Runner:
    """vLLM's first model runner: a drafter's graph writes to the memory that the policy's wrote to."""

    def __init__(self, wanted: dict[str, int], speculates: bool) -> None:
        self.num_prompt_logprobs = wanted
        self.speculative_config = object() if speculates else None
        self.graph_memory = torch.tensor([1.0, 2.0])
        self.execute_model_state: StepState | None = StepState(torch.zeros(2), self.graph_memory)

    def sample_tokens(self, grammar_output: object) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.execute_model_state is None:
            return None
        logits, hidden_states = self.execute_model_state
        if self.speculative_config is not None:
            self.graph_memory.fill_(9.0)
        return logits, hidden_states


@pytest.fixture
def runner_class(monkeypatch) -> type[Runner]:
    """The model runner after the work-around."""
    patched = type("Patched", (Runner,), {"sample_tokens": Runner.sample_tokens})
    stand_in(monkeypatch, "vllm.v1.worker.gpu_model_runner").GPUModelRunner = patched
    _keep_hidden_states_from_drafter()
    return patched


def test_prompt_logprobs_come_from_hidden_states_that_no_drafter_wrote_to(runner_class):
    runner = runner_class({"probe": 0}, speculates=True)
    logits, hidden_states = runner.sample_tokens(None)
    assert hidden_states.tolist() == [1.0, 2.0]
    assert logits.tolist() == [0.0, 0.0] and runner.graph_memory.tolist() == [9.0, 9.0]


@pytest.mark.parametrize(("wanted", "speculates"), [({}, True), ({"probe": 0}, False)])
def test_hidden_states_are_not_copied_without_need(runner_class, wanted, speculates):
    runner = runner_class(wanted, speculates)
    assert runner.sample_tokens(None)[1] is runner.graph_memory


def test_rank_without_logits_is_left_alone(runner_class):
    runner = runner_class({"probe": 0}, speculates=True)
    runner.execute_model_state = None
    assert runner.sample_tokens(None) is None
