"""Pacers, drafters and random machines that several tests simulate."""

import random

from paceline.pacing.adaptive import AdaptivePacer
from paceline.pacing.settings import PacingSettings
from paceline.pacing.strategy import Strategy
from tests.pacing.world import BUCKETS, SimulatedDrafter, World, long_tailed

COUNTS = (1, 2, 3, 5, 7, 11, 15)


def strategies(*drafters: str, counts: tuple[int, ...] = COUNTS) -> list[Strategy]:
    return [Strategy(drafter, count) for drafter in drafters for count in counts]


def make_pacer(*drafters: str, seed: int = 0, catch_up: float = 0.0) -> AdaptivePacer:
    """`catch_up`: what catching up with a token is said to take of the policy's own work."""
    return AdaptivePacer(
        PacingSettings(
            BUCKETS, tuple(strategies(*drafters)), seed, catch_up=dict.fromkeys(drafters, catch_up)
        )
    )


def head(*rates: float, seconds_per_token: float = 2.5e-4, switch_seconds: float = 0.0) -> SimulatedDrafter:
    """Acceptance by depth, the last one repeated; costs what an EAGLE head costs."""
    return SimulatedDrafter(
        lambda d, context, step: rates[min(d, len(rates)) - 1],
        lambda k, bucket: seconds_per_token * k,
        switch_seconds,
    )


def random_world(seed: int) -> tuple[World, list[int]]:
    rng = random.Random(seed)

    def drafter() -> SimulatedDrafter:
        first = rng.choice((0.0, 0.2, 0.4, 0.6, 0.8, 0.9))
        falling = rng.choice((0.0, 0.02, 0.05))
        longer = rng.choice((0.0, 0.0, -0.2, 0.2))
        seconds = rng.choice((2e-5, 1e-4, 3e-4, 1e-3))
        per_token = rng.random() < 0.7
        return SimulatedDrafter(
            lambda d, context, step: min(
                0.98, max(0.0, first - falling * (d - 1) + longer * (context > 1000))
            ),
            lambda k, bucket: seconds * (k if per_token else 1),
            rng.choice((0.0, 0.0, 2e-3)),
        )

    drafters = {name: drafter() for name in ("x", "y")[: rng.choice((1, 2))]}
    weights = rng.choice((1e-3, 4.4e-3, 2e-2))
    token = rng.choice((1e-5, 3e-5, 1e-4, 1e-3))
    attention = rng.choice((0.0, 2e-9, 1e-8))
    world = World(drafters, weights, token, attention, noise=rng.choice((0.0, 0.02, 0.05)))
    return world, long_tailed(rng.choice((48, 128)), 250, seed, 2000)


def remembering(acceptance) -> World:
    return World({"history": SimulatedDrafter(acceptance, lambda k, bucket: 2e-5)})


def speculating(outcome, steps: int) -> float:
    """The share of a rollout's first steps."""
    return sum(s.count > 0 for s in outcome.strategies[:steps]) / steps
