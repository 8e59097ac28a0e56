"""Captures into one memory pool of torch's allocator, and measures the device memory that takes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Capture(Generic[Outcome]):
    """A captured graph, what its function returned, and the device memory it took."""

    graph: torch.cuda.CUDAGraph
    outcome: Outcome
    # Bytes by which the pool grew.
    pool_bytes: int
    # Bytes taken beside the pool.
    graph_bytes: int


class GraphPool:
    """The memory pool that all graphs of an engine share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._handle = None
        # A pool lives as long as one of its graphs.
        self._segment: torch.cuda.CUDAGraph | None = None
        # One for all captures: memory that the allocator caches for a stream is unusable to others.
        self._warm_up_stream = None

    def reserve(self, num_bytes: int, uses_cublas: bool) -> int:
        """Makes a segment that captures from here on allocate from; returns how much the pool grew.

        The allocator gives a pool's memory to captures only, so a graph that is never replayed allocates and
        releases it. cuBLAS keeps a workspace for the capturing stream from its first product on: better
        before the segment than in the middle of it.
        """
        some = torch.zeros(16, 16, dtype=torch.bfloat16, device=self.device)

        def allocate(size: int) -> None:
            if uses_cublas:
                torch.mm(some, some)
            torch.empty(size, dtype=torch.uint8, device=self.device)[:1].zero_()

        # Loads kernels and creates cuBLAS's handle outside of any capture.
        allocate(1)
        capture = self._record(lambda: allocate(num_bytes))
        self._segment = capture.graph
        return capture.pool_bytes

    def capture(self, function: Callable[[], Outcome]) -> Capture[Outcome]:
        """Captures a function after running it once.

        That run compiles kernels and sets up libraries outside of the capture.
        """
        stream = self._warm_up_stream = self._warm_up_stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        return self._record(function)

    def _record(self, function: Callable[[], Outcome]) -> Capture[Outcome]:
        graph = torch.cuda.CUDAGraph()
        self._handle = self._handle or torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        # As capturing would do anyway; after this only the pool grows.
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
        free = torch.cuda.mem_get_info()[0]
        with torch.cuda.graph(graph, pool=self._handle):
            outcome = function()
        pool_bytes = torch.cuda.memory_reserved() - reserved
        return Capture(graph, outcome, pool_bytes, free - torch.cuda.mem_get_info()[0] - pool_bytes)
