"""The first paced rollout must not cost more than it learns: nine lengths and acceptances on a measured H200.

Before it, steps were timed on null rows (`engine/start_timing.py`), a few batch sizes of them.
benchmarks/notes/pacing.md has the figures; `python -m tests.pacing.test_cold_start` prints them.
"""

import math
import random
from dataclasses import replace

import pytest

from paceline.pacing.adaptive import AdaptivePacer
from paceline.pacing.settings import PacingSettings
from paceline.pacing.strategy import PLAIN, FixedPacer, StepTime
from tests.pacing.h200 import H200, STRATEGIES, h200
from tests.pacing.world import SimulatedDrafter, simulate

# Requests, and mean, sigma, least and most of a log-normal.
LENGTHS = {
    "256 requests, 512": (256, 512, 1.0, 16, 4096),
    "192 requests, 700": (192, 700, 1.2, 8, 5000),
    "64 requests, 400": (64, 400, 0.8, 8, 2500),
}
ACCEPTANCE = {
    "0.8 / 0.78 / 0.76 / 0.74 / 0.7": (0.8, 0.78, 0.76, 0.74, 0.7),
    "0.62 / 0.5 / 0.4 / 0.3": (0.62, 0.5, 0.4, 0.3),
    "0.35 / 0.25 / 0.2": (0.35, 0.25, 0.2),
}
# Batch sizes that are timed at the start, of 256.
TIMED = (256, 64, 16, 4, 1)
# Of these the best is the best fixed strategy; deeper ones are worse on every line.
FIXED = (PLAIN, *STRATEGIES[:5])


def drawn(count: int, mean: float, sigma: float, low: int, high: int) -> list[int]:
    rng = random.Random(0)
    mu = math.log(mean) - sigma**2 / 2
    return [max(low, min(high, int(rng.lognormvariate(mu, sigma)))) for _ in range(count)]


def world_of(rates: tuple[float, ...]) -> H200:
    drafter = SimulatedDrafter(
        lambda d, context, step: rates[min(d, len(rates)) - 1], lambda k, bucket: 1.9e-4 * k
    )
    return replace(h200(), drafters={"oracle": drafter})


def timed_at_start(world: H200) -> list[StepTime]:
    return [
        StepTime(
            bucket,
            strategy,
            1.9e-4 * strategy.count,
            world.verify_seconds(bucket, strategy.queries, 0.0),
        )
        for bucket in TIMED
        for strategy in (PLAIN, *STRATEGIES)
        if strategy.queries <= world.max_queries(bucket)
    ]


def ratios(lengths: str, acceptance: str, rollouts: int, times: bool = True) -> list[float]:
    """Returns the seconds of a pacer's rollouts over those of the best fixed strategy."""
    world, wanted = world_of(ACCEPTANCE[acceptance]), drawn(*LENGTHS[lengths])
    best = min(simulate(world, FixedPacer(strategy), wanted).seconds for strategy in FIXED)
    pacer = AdaptivePacer(PacingSettings(world.buckets, STRATEGIES))
    if times:
        assert pacer.untimed() == (PLAIN, *STRATEGIES)
        pacer.take_times(timed_at_start(world))
        assert not pacer.untimed()
    return [simulate(world, pacer, wanted, seed).seconds / best for seed in range(rollouts)]


@pytest.mark.slow
@pytest.mark.parametrize("lengths, acceptance", [(n, a) for n in LENGTHS for a in ACCEPTANCE])
def test_first_rollout_is_no_slower_than_the_best_fixed_strategy(lengths, acceptance):
    first, second = ratios(lengths, acceptance, 2)
    assert first < 1.03 and second < 1.01, (first, second)


if __name__ == "__main__":
    for lengths in LENGTHS:
        for acceptance in ACCEPTANCE:
            shown = [*ratios(lengths, acceptance, 2), *ratios(lengths, acceptance, 1, times=False)]
            print(f"| {lengths} | {acceptance} | {' | '.join(f'{r - 1:+.1%}' for r in shown)} |", flush=True)
