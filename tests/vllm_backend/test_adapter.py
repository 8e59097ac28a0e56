"""What the adapter asks of vLLM where no GPU is at hand: steps begun ahead, and the drafter's own LM head."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from paceline.vllm_backend.adapter import VllmEngine
from paceline.vllm_backend.patches import _keep_drafter_head_apart_on_gpu


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


def test_settling_ends_what_was_begun_and_begins_nothing():
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


@pytest.mark.parametrize(
    ("flag", "own", "shares"),
    [
        ("has_own_lm_head", True, False),
        ("has_own_lm_head", False, True),
        ("has_own_embed_tokens", True, True),
    ],
)
def test_a_drafter_that_has_an_lm_head_keeps_it_on_a_gpu(monkeypatch, flag, own, shares):
    """vLLM's second model runner shares the policy's where both are equal when they are loaded."""
    name = "vllm.v1.worker.gpu.spec_decode.eagle"
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    utils = SimpleNamespace(_should_share=lambda drafter, flag, mine, theirs: mine == theirs)
    sys.modules[name].utils = utils
    _keep_drafter_head_apart_on_gpu()
    assert utils._should_share(SimpleNamespace(**{flag: own}), flag, "equal", "equal") == shares
