"""Steps as CUDA graphs, captured on demand from one memory pool, by shape (rows and tokens) and variant.

On a CPU there is nothing to capture and the step runs eagerly; so it does during training
(`capture_guard.py`). Memory limits what may be captured (`graph_memory.py`); a step beyond the limit runs
eagerly, too.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from paceline.drafting.base import Drafter
from paceline.engine.capture_guard import CaptureGuard
from paceline.engine.graph_memory import GraphMemory
from paceline.engine.graph_pool import GraphPool
from paceline.engine.proposals import Proposals
from paceline.engine.rows import MAX_QUERY, Rows
from paceline.engine.sampling import StepVariant
from paceline.engine.settings import EngineSettings
from paceline.engine.step import StepShape, StepStatus, step
from paceline.engine.step_bytes import StepBytes
from paceline.kernels.triton_support import multiprocessors
from paceline.paged.cache import KVCache
from paceline.paged.forward import PagedForward
from paceline.precision.weights import QuantisedWeights

Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class GraphKey:
    """Steps with the same key replay the same graph."""

    shape: StepShape
    variant: StepVariant
    # The drafter that proposed trees, which receives the paths taken through them.
    proposer: str = ""


@dataclass
class CapturedStep:
    """A step's graph and the tensors that receive its outcome."""

    graph: torch.cuda.CUDAGraph
    status: StepStatus


@dataclass(frozen=True)
class DraftKey:
    """Drafts with the same key replay the same graph."""

    bucket: int
    drafter: str
    count: int
    truncates: bool
    tree: bool


class StepRunner:
    """Runs drafts and steps for the first `bucket` entries of `slots`, which the caller fills.

    A draft and the step that verifies it are two graphs that meet in `proposals`, so drafters share
    verification.
    """

    def __init__(
        self, forward: PagedForward, rows: Rows, settings: EngineSettings, drafters: Sequence[Drafter] = ()
    ) -> None:
        self.forward = forward
        self.followers = [drafter for drafter in drafters if drafter.captured_layers]
        self.rows = rows
        num_slots = settings.max_running
        device = rows.device
        policy = forward.policy
        self.slots = torch.full((num_slots,), rows.null_slot, dtype=torch.int64, device=device)
        self.proposals = Proposals.empty(num_slots + 1, MAX_QUERY - 1, device)
        # The distributions that proposals were drawn from, where rejection needs them.
        self.probabilities_SKV: torch.Tensor | None = None
        self.captured: dict[GraphKey, CapturedStep] = {}
        self.captured_drafts: dict[DraftKey, torch.cuda.CUDAGraph] = {}
        self.capture_seconds = 0.0
        self.guard = CaptureGuard()
        self.pool = GraphPool(device)
        needs = StepBytes(
            policy.config,
            policy.dtype,
            row_tokens=rows.state.tokens.shape[1],
            processors=multiprocessors(device),
            fp8=forward.quantised is not None,
            captured_layers=len(forward.captured_layers),
            records_routing=forward.cache.routing is not None,
            drafters=tuple(d.shape for d in drafters if d.shape is not None),
            drafts_fp8=any(drafter.fp8 for drafter in drafters),
            trees=settings.trees,
        )
        deepest = min(settings.max_proposal, max((drafter.max_tokens for drafter in drafters), default=0))
        budget = settings.graph_memory if device.type == "cuda" else 0
        self.memory = GraphMemory(
            needs, buckets_up_to(num_slots), min(MAX_QUERY, 1 + deepest), budget, not settings.deterministic
        )

    def keep_probabilities(self, vocab_size: int, dtype: torch.dtype) -> None:
        self.probabilities_SKV = torch.zeros(
            *self.proposals.tokens_SK.shape, vocab_size, dtype=dtype, device=self.rows.device
        )

    def run(
        self,
        bucket: int,
        num_queries: int,
        variant: StepVariant,
        proposer: Drafter | None = None,
        tree: bool = False,
    ) -> StepStatus:
        """Runs a step; the status of the bucket's rows is valid until the next run of the same key.

        With `tree` the proposals are trees, and `proposer` receives the outcome.
        """
        shape = StepShape(bucket, num_queries, tree)
        key = GraphKey(shape, variant, "" if proposer is None else proposer.name)
        if key not in self.captured:
            if (
                variant.masked
            ):  # the host is in every step of these, and the mask is not in the planned memory
                return self._step(shape, variant, proposer)
            if not self.memory.fits(bucket, num_queries) or not self._begin_capture():
                return self._step(shape, variant, proposer)
            self.captured[key] = CapturedStep(
                *self._captured(shape, lambda: self._step(shape, variant, proposer))
            )
        captured = self.captured[key]
        captured.graph.replay()
        return captured.status

    def draft(self, bucket: int, drafter: Drafter, count: int, truncates: bool, tree: bool = False) -> None:
        """Writes proposals for the bucket's rows."""
        propose = drafter.propose_tree if tree else drafter.propose
        key = DraftKey(bucket, drafter.name, count, truncates, tree)
        if key not in self.captured_drafts:
            # A draft's memory does not depend on its depth; the shallowest that is verified has two.
            if not self.memory.fits(bucket, 2) or not self._begin_capture():
                propose(self.slots[:bucket], count, truncates)
                return
            self.captured_drafts[key], _ = self._captured(
                StepShape(bucket, 1), lambda: propose(self.slots[:bucket], count, truncates)
            )
        self.captured_drafts[key].replay()

    def _begin_capture(self) -> bool:
        """Returns whether the caller may capture; if so, it must end with `guard.end_capture`."""
        return self.rows.device.type == "cuda" and self.guard.begin_capture()

    def replace(self, cache: KVCache, quantised: QuantisedWeights | None) -> None:
        """Switches to other storage; drops captured steps, which hold the old addresses."""
        self.forward.cache = cache
        self.forward.quantised = quantised
        self.captured.clear()

    def _step(self, shape: StepShape, variant: StepVariant, proposer: Drafter | None) -> StepStatus:
        return step(
            self.forward,
            self.rows,
            self.slots[: shape.rows],
            self.proposals,
            shape,
            variant,
            self.followers,
            self.probabilities_SKV,
            proposer,
        )

    def _captured(
        self, shape: StepShape, function: Callable[[], Outcome]
    ) -> tuple[torch.cuda.CUDAGraph, Outcome]:
        """Captures a function and ends the capture that `_begin_capture` began.

        Capturing and the warm-up before it run on null rows only, so no request is affected.
        """
        kept = self.slots.clone()
        try:
            torch.cuda.synchronize()
            # Not earlier: waiting for the steps in flight is no capture time.
            start = time.perf_counter()
            self.slots.fill_(self.rows.null_slot)
            if not self.memory.segment:
                num_bytes = self.memory.largest()
                self.memory.note_segment(
                    num_bytes, self.pool.reserve(num_bytes, not self.forward.deterministic)
                )
            capture = self.pool.capture(function)
            self.memory.note(shape.rows, shape.num_queries, capture.pool_bytes, capture.graph_bytes)
        finally:
            self.slots.copy_(kept)
            torch.cuda.synchronize()
            self.guard.end_capture()
        self.capture_seconds += time.perf_counter() - start
        return capture.graph, capture.outcome


def buckets_up_to(num_slots: int) -> list[int]:
    """Returns the batch sizes worth a graph: dense where decoding is cheap, in steps of 16 to 64 above."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), *range(288, 1025, 32), *range(1088, 1 << 16, 64)]
    below = [size for size in sizes if size < num_slots]
    return [*below, num_slots]
