"""The pool of captured graphs within its budget: the engine's own steps and drafts, allocated by a model of
torch's allocator.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from paceline.config import load_config
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.drafting.history import HistoryDrafter
from paceline.engine.engine import Engine
from paceline.engine.graph_memory import SEGMENT, SMALL_BYTES, GraphMemory
from paceline.engine.graph_pool import Capture
from paceline.engine.graphs import StepRunner, buckets_up_to
from paceline.engine.sampling import StepVariant, Verify
from paceline.engine.settings import EngineSettings
from paceline.engine.step_bytes import StepBytes
from paceline.plan import rollout
from paceline.policy.decoder import Decoder
from paceline.policy.shapes import SHAPES
from tests.caching_allocator import CachingAllocator
from tests.gpu_path import META, PROCESSORS, Allocations, make_runner, on_gpu, silence_kernels

SHAPE = dataclasses.replace(SHAPES["qwen3-8b"], num_layers=4)
GROWING = [(256, 1), (256, 2), (16, 4), (256, 4), (200, 6), (256, 8), (224, 12), (256, 16), (1, 16), (16, 16)]


class ModelPool:
    """In `GraphPool`'s place: runs nothing, and allocates what a GPU would."""

    def __init__(self, reserves: bool = True) -> None:
        self.allocator, self.reserves, self.captures = CachingAllocator(), reserves, 0

    def reserve(self, num_bytes: int, uses_cublas: bool) -> int:
        before = self.allocator.taken
        if uses_cublas:
            self.allocator.allocate("workspace", 32 << 20)
        if self.reserves:
            self.allocator.allocate("segment", num_bytes)
            self.allocator.release("segment")
        return self.allocator.taken - before

    def capture(self, function) -> Capture:
        before, self.captures = self.allocator.taken, self.captures + 1
        with on_gpu(), Allocations() as allocations:
            outcome = function()
        self.allocator.replay(self.captures, allocations.events)  # what is left is the outcome's
        return Capture(SimpleNamespace(replay=lambda: None), outcome, self.allocator.taken - before, 0)


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    silence_kernels(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(StepRunner, "_begin_capture", lambda self: self.guard.begin_capture())
    with torch.inference_mode():
        yield


def runner_with(
    budget: int, drafters=None, pool: ModelPool | None = None, **settings
) -> tuple[StepRunner, CachingAllocator]:
    settings = EngineSettings(graph_memory=budget, **{"max_running": 256, "deterministic": True, **settings})
    runner = make_runner(SHAPE, settings, (HistoryDrafter(),) if drafters is None else drafters)
    runner.pool = pool or ModelPool()
    return runner, runner.pool.allocator


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "fast"])
@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "fp8+kv"])
def test_graphs_of_growing_steps_share_one_segment(precision, deterministic):
    """Issue 6: every strategy of 256 rows of the 8B shape within 2 GB."""
    runner, allocator = runner_with(2_000_000_000, precision=precision, deterministic=deterministic)
    assert runner.memory.max_queries(256) == 16
    for bucket, queries in GROWING:
        runner.run(bucket, queries, StepVariant())
    assert len(runner.captured) == len(GROWING)
    assert allocator.large_segments == [*([] if deterministic else [32 << 20]), runner.memory.segment]
    assert (
        runner.memory.pool_bytes
        == allocator.taken
        <= runner.memory.segment + runner.memory.beside
        < 900_000_000
    )


def test_step_runner_captures_nothing_during_training():
    runner, allocator = runner_with(2_000_000_000)
    with runner.guard.training(), on_gpu():
        runner.run(16, 4, StepVariant())
        assert not runner.captured and not allocator.taken, "the step ran as it is"
    runner.run(16, 4, StepVariant())
    assert len(runner.captured) == 1 and runner.memory.pool_bytes == allocator.taken > 0


@pytest.mark.slow
def test_graph_pool_without_a_segment_keeps_one_per_size():
    """What the segment is for."""
    taken = []
    for reserves in (True, False):
        runner, allocator = runner_with(0, pool=ModelPool(reserves))
        for bucket in runner.memory.buckets:
            runner.run(bucket, 16, StepVariant())
        taken.append(allocator.taken)
    assert taken[0] <= runner.memory.segment + SMALL_BYTES < 0.75 * taken[1]


@pytest.mark.slow
@pytest.mark.parametrize("deepest", [4, pytest.param(15, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["eagle", "draft model"])
def test_draft_graphs_fit_into_the_segment(kind, deepest):
    draft = Decoder(dataclasses.replace(SHAPES["qwen3-0.6b"], num_layers=2), torch.bfloat16, META)
    drafter = (
        EagleDrafter(EagleHead(config_for(SHAPE), torch.bfloat16, META))
        if kind == "eagle"
        else DraftModel(draft)
    )
    runner, allocator = runner_with(2_000_000_000, (drafter,), verify="rejection")
    for bucket, count in ((16, 3), (256, 1), (40, deepest), (256, 2)):
        for truncates in (False, bucket < 64):
            with on_gpu():
                runner.draft(bucket, drafter, count, truncates)
            runner.run(bucket, count + 1, StepVariant(verify=Verify.REJECTION, truncates=truncates))
    assert (
        allocator.large_segments == [runner.memory.segment]
        and allocator.taken <= runner.memory.segment + SMALL_BYTES < 1_000_000_000
    )


def test_draft_of_more_rows_than_a_piece_has_tokens_fits_the_budget():
    """Drafters sample all rows at once: there a draft needs more than the step that verifies it."""
    drafter = DraftModel(
        Decoder(dataclasses.replace(SHAPES["qwen3-0.6b"], num_layers=2), torch.bfloat16, META)
    )
    runner, allocator = runner_with(2_500_000_000, (drafter,), max_running=1024, max_proposal=1)
    assert runner.memory.max_queries(1024) == 2
    with on_gpu():
        runner.draft(1024, drafter, 1, truncates=False)
    runner.run(1024, 2, StepVariant())
    assert allocator.large_segments == [runner.memory.segment] and allocator.taken <= 2_500_000_000
    assert (
        runner_with(1_500_000_000, (drafter,), max_running=1024, max_proposal=1)[0].memory.max_queries(1024)
        == 1
    )


def test_graph_memory_keeps_a_small_budget_when_deeper_steps_are_asked_for():
    budget = 520_000_000
    runner, allocator = runner_with(budget, verify="rejection")
    memory = runner.memory
    deepest = {bucket: memory.max_queries(bucket) for bucket in memory.buckets}
    assert list(deepest.values()) == sorted(deepest.values(), reverse=True), (
        "the more rows, the fewer proposals"
    )
    assert deepest[128] == 16 and 8 <= deepest[256] < 16
    variants = (
        StepVariant(),
        StepVariant(truncates=True, top_logprobs=5),
        StepVariant(truncates=True, verify=Verify.REJECTION),
    )
    for bucket, variant in zip((256, 24, 16), variants, strict=True):
        runner.run(bucket, min(4, deepest[bucket]) if bucket < 256 else deepest[256], variant)
    for bucket in (256, 240):  # a pacer that ignores the limit
        with on_gpu():
            runner.run(bucket, 16, StepVariant())
    assert len(runner.captured) == 3, "what does not fit runs without a graph"
    assert allocator.large_segments == [memory.segment] and memory.pool_bytes == allocator.taken <= budget
    for bucket in memory.buckets[-4:]:
        runner.run(bucket, 1, StepVariant())
    assert memory.pool_bytes == allocator.taken <= budget


def test_plain_decoding_is_captured_at_any_budget():
    runner, allocator = runner_with(50_000_000)
    assert runner.memory.max_queries(256) == 1 < runner.memory.max_queries(1)
    runner.run(256, 1, StepVariant())
    assert len(runner.captured) == 1 and allocator.large_segments == [runner.memory.segment] == [
        runner.memory.need(256, 1)
    ]


NEEDS = StepBytes(SHAPE, torch.bfloat16, 4096, PROCESSORS)


def memory_of(budget: int, depth: int = 16) -> GraphMemory:
    return GraphMemory(NEEDS, buckets_up_to(256), depth, budget, uses_cublas=False)


def test_graph_memory_budget_limits_the_tokens_per_step():
    assert memory_of(0).max_queries(256) == 16, "no budget, no limit"
    assert memory_of(0, depth=5).max_queries(1) == 5
    memory = memory_of(540_000_000)
    before = {bucket: memory.max_queries(bucket) for bucket in memory.buckets}
    assert (
        max(memory.need(bucket, queries) for bucket, queries in before.items())
        == memory.largest()
        <= 540_000_000 - SMALL_BYTES
    )
    memory.note_segment(memory.largest(), memory.largest())
    assert before == {bucket: memory.max_queries(bucket) for bucket in memory.buckets}, (
        "the segment holds exactly what was foreseen"
    )


def test_graph_memory_counts_captures_that_exceed_their_estimate():
    memory = memory_of(1_000_000_000)
    memory.note_segment(memory.largest(), memory.largest())
    memory.note(64, 8, 2 * SEGMENT, 1000)
    assert memory.max_queries(256) == 16 and memory.graph_bytes == 1000
    memory.note(128, 8, 1_000_000_000, 0)
    deepest = [memory.max_queries(bucket) for bucket in (64, 128, 256)]
    assert deepest == [8, 8, 1], "what there is may run, and nothing more is captured"


@pytest.mark.parametrize(
    "drafters, verify", [("[]", "shared-noise"), ("[history]", "shared-noise"), ("[history]", "rejection")]
)
def test_rollout_plan_reserves_the_graph_memory_of_the_engine(drafters, verify, monkeypatch):
    monkeypatch.setattr(rollout, "PROCESSORS", PROCESSORS)
    speculation = [f"drafters={drafters}", f"verify={verify}", "tokens=5"]
    config = load_config(
        None, ["rollout.max_running=100", *(f"rollout.speculation.{setting}" for setting in speculation)]
    )
    settings = EngineSettings(100, max_proposal=5, graph_memory=2_000_000_000, verify=verify)
    runner = make_runner(SHAPE, settings, (HistoryDrafter(),) if drafters != "[]" else ())
    planned = rollout.rollout_bytes(Decoder(SHAPE, torch.bfloat16, META), config)
    graphs = len(buckets_up_to(100)) * (1 if drafters == "[]" else 5)
    assert planned.graphs - graphs * rollout.GRAPH_BYTES == runner.memory.largest() + runner.memory.beside


def test_engine_graph_depth_is_limited_by_its_drafters():
    policy = Decoder(
        dataclasses.replace(SHAPE, num_layers=1, vocab_size=50, hidden_size=16, intermediate_size=16)
    ).initialise(0)
    for settings, drafters, depth in (
        ({}, [], 1),
        ({}, [HistoryDrafter()], 16),
        ({"max_proposal": 4}, [HistoryDrafter()], 5),
    ):
        engine = Engine(
            policy, EngineSettings(max_running=4, kv_tokens=64, max_length=64, **settings), drafters=drafters
        )
        assert engine.runner.memory.depth == depth
