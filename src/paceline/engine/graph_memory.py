"""How much memory captured graphs take, and what may be captured within a budget.

Graphs run one after the other, and none keeps more than its small outputs, so all of them fit into the memory
of the largest:

    segment     |<------ reserved before the first capture ------>|
    256 x 1     | .................... |
    256 x 8     | ............................................... |
    16 x 16     | .............................. |

torch's allocator alone would not do this. It takes a new segment for each tensor that no free one can hold,
never joins two, and releases none: captured from small to large, what one step has outgrown stays beside what
the next one takes (0.98 GB instead of 0.57 for the steps of up to 256 x 16 tokens of Qwen3-8B). So everything
above 1 MiB comes out of one segment (those are multiples of 2 MiB; between 1 and 10 MiB a tensor alone would
get 20), and only smaller tensors and the graphs' outputs take segments of 2 MiB beside it.

A budget is therefore a limit on the steps that exist: the segment is as large as the largest within it, and
deeper ones run for smaller batches only. A capture that takes more than its estimate is counted, and nothing
deeper is captured after it.
"""

import functools
from collections.abc import Sequence

from paceline.engine.step_bytes import StepBytes

# Factor of a step's bytes for fragmentation: best fit leaves gaps between tensors of different sizes.
# Replaying the allocations of the shapes in `policy/shapes.py` took up to 1.48 times what was alive at once
# (FP8, whose products in parts are larger than anything else).
GAPS = 1.5
# Bytes that torch's allocator rounds segments to.
SEGMENT = 2 << 20
# Bytes of small tensors: up to 10 MiB in one step, and the outputs of some hundred graphs.
SMALL_BYTES = 16 << 20
# Bytes of cuBLAS: it keeps 32 MiB for a stream, and matmuls in FP8 may take as much for themselves.
CUBLAS_BYTES = 64 << 20


class GraphMemory:
    """Estimates the bytes of a step's graph, and counts the bytes that captured ones have taken."""

    def __init__(
        self, needs: StepBytes, buckets: Sequence[int], depth: int, budget: int, uses_cublas: bool
    ) -> None:
        """Plans for steps of up to `depth` tokens a row, for each of the batch sizes `buckets`."""
        self.buckets = buckets
        self.depth = depth
        # Bytes; 0: no limit.
        self.budget = budget
        self.beside = SMALL_BYTES + (CUBLAS_BYTES if uses_cublas else 0)
        # Bytes; 0: nothing has been captured.
        self.segment = 0
        # Bytes that the pool has taken from the device.
        self.pool_bytes = 0
        # Bytes that captures took beside the pool: the graphs themselves, and kernels loaded meanwhile.
        self.graph_bytes = 0
        # Batch size and tokens a row.
        self.captured: set[tuple[int, int]] = set()
        self._needs = needs
        self.need = functools.cache(self._need)

    def _need(self, bucket: int, num_queries: int) -> int:
        """Returns the bytes of the segment that a step and the drafts for it need."""
        held = max(self._needs.step(bucket, num_queries), self._needs.draft(bucket) if num_queries > 1 else 0)
        return -(-int(GAPS * held) // SEGMENT) * SEGMENT

    def would_hold(self, bucket: int, num_queries: int) -> int:
        """Returns the pool's bytes once this step has been captured."""
        need = self.need(bucket, num_queries)
        if not self.segment:
            return need + self.beside
        return self.pool_bytes + (need if need > self.segment else 0)

    def fits(self, bucket: int, num_queries: int) -> bool:
        """Returns whether a step fits the budget; plain decoding always does."""
        return (
            num_queries == 1
            or not self.budget
            or (bucket, num_queries) in self.captured
            or self.would_hold(bucket, num_queries) <= self.budget
        )

    def max_queries(self, bucket: int) -> int:
        """Returns the most tokens per row in a step of this bucket."""
        return next(
            (num_queries for num_queries in range(self.depth, 1, -1) if self.fits(bucket, num_queries)), 1
        )

    def largest(self) -> int:
        """Returns the bytes of the segment: those of the largest step that fits."""
        return max(self.need(bucket, self.max_queries(bucket)) for bucket in self.buckets)

    def note_segment(self, num_bytes: int, pool_bytes: int) -> None:
        self.segment = num_bytes
        self.pool_bytes += pool_bytes

    def note(self, bucket: int, num_queries: int, pool_bytes: int, graph_bytes: int) -> None:
        """Records the bytes of a captured step, or of a draft (as one token a row)."""
        self.captured.add((bucket, num_queries))
        self.pool_bytes += pool_bytes
        self.graph_bytes += graph_bytes
