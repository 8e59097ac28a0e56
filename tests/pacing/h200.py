"""A rollout that was measured, as a world: Qwen3-8B's shape on an H200, deterministic mode, 256 requests with
a long tail.

Seconds were fitted to the blocks of steps of a paced rollout (`bench pacing`, whose drafter's luck is a hash,
so the tokens of each block are known exactly) and to the verification table of benchmarks/notes/. Matrix
products work in row tiles, so time is a staircase in the tokens of a step, and a half-filled tile of 128 rows
takes longer than a full one: no smooth curve through a few points predicts it.
"""

import math
import random
from bisect import bisect_left

from paceline.engine.graphs import buckets_up_to
from paceline.pacing.strategy import Strategy
from tests.pacing.world import SimulatedDrafter, World

STRATEGIES = tuple(Strategy("oracle", count) for count in (1, 2, 3, 5, 7, 11, 15))
ACCEPTANCE = (0.8, 0.78, 0.76, 0.74, 0.7)
TILE_TOKENS = (16, 32, 64, 127, 128, 256, 384, 512, 640, 768, 896)
TILE_MS = (4.23, 4.60, 4.83, 6.95, 5.5, 8.06, 11.7, 13.2, 16.8, 20.0, 23.7)
MAX_TOKENS = 873  # of one step, as 2 GB for graphs allowed
# (running, proposed, context, ms) of the paced rollout, blocks without a capture or a prefill.
MEASURED = (
    (1, 5, 3220, 5.38),
    (1, 7, 3650, 5.75),
    (2, 5, 2950, 5.64),
    (3, 5, 2570, 6.01),
    (7, 5, 2125, 6.66),
    (9, 3, 1964, 6.09),
    (13, 3, 1595, 6.22),
    (16, 3, 1458, 6.24),
    (21, 3, 1347, 8.77),
    (28, 2, 1169, 8.71),
    (38, 5, 970, 11.03),
    (51, 5, 818, 14.88),
    (60, 5, 747, 15.61),
    (82, 3, 618, 14.46),
    (104, 3, 529, 16.19),
    (121, 3, 477, 16.99),
    (137, 2, 426, 16.06),
    (168, 1, 356, 14.90),
    (187, 1, 310, 14.58),
    (200, 1, 272, 16.03),
    (22, 0, 1285, 5.59),
    (64, 0, 730, 6.60),
)


class H200(World):
    def verify_seconds(self, running: int, queries: int, context: float) -> float:
        bucket = self.bucket(running)
        tile = TILE_MS[bisect_left(TILE_TOKENS, bucket * queries)]
        return 1e-3 * (tile + 4.5e-3 * bucket + (2.4e-5 + 3.5e-6 * queries) * running * context)


def h200() -> H200:
    oracle = SimulatedDrafter(
        lambda d, context, step: ACCEPTANCE[min(d, 5) - 1], lambda k, bucket: 1.9e-4 * k
    )
    return H200(
        {"oracle": oracle},
        noise=0.01,
        outliers=0.01,
        buckets=tuple(buckets_up_to(256)),
        max_tokens=MAX_TOKENS,
        capture_seconds=0.04,
    )


def lengths() -> list[int]:
    """As `bench pacing` draws them."""
    rng = random.Random(0)
    return [max(16, min(4096, int(rng.lognormvariate(math.log(512) - 0.5, 1.0)))) for _ in range(256)]
