"""A machine and drafters that are known exactly, with a simulated clock: what pacers are measured against.

A step's time is a smooth roofline in bucket * queries plus a part for attended tokens, seen through noise and outliers. A drafter
is its acceptance (by depth, context and step), its seconds, and what catching up costs. Outcomes reach the pacer `ahead`
steps late, as they do in an engine that launches ahead.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from paceline.pacing.strategy import PLAIN, Decision, Moment, Observation, Pacer, Strategy

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class SimulatedDrafter:
    acceptance: Callable[[int, float, int], float]  # (depth from 1, mean context, step) -> a_d
    seconds: Callable[[int, int], float] = lambda count, bucket: 2e-5
    switch_seconds: float = 0.0


@dataclass(frozen=True)
class World:
    drafters: dict[str, SimulatedDrafter]
    weights_seconds: float = 4.4e-3  # reading the weights
    token_seconds: float = 3e-5  # computing one token
    attention_seconds: float = 2e-9  # per attended token
    noise: float = 0.02
    outliers: float = 0.005

    def bucket(self, running: int) -> int:
        return next(b for b in BUCKETS if b >= running)

    def verify_seconds(self, running: int, queries: int, context: float) -> float:
        tokens = self.bucket(running) * queries
        roofline = (self.weights_seconds**4 + (tokens * self.token_seconds) ** 4) ** 0.25
        return roofline + self.attention_seconds * running * context

    def rate(self, strategy: Strategy, running: int, context: float, step: int) -> float:
        """True expected tokens per second."""
        seconds, emitted, reach = self.verify_seconds(running, strategy.queries, context), 1.0, 1.0
        if strategy.count:
            drafter = self.drafters[strategy.drafter]
            seconds += drafter.seconds(strategy.count, self.bucket(running))
            for d in range(1, strategy.count + 1):
                reach *= drafter.acceptance(d, context, step)
                emitted += reach
        return running * emitted / seconds


@dataclass
class Outcome:
    seconds: float = 0.0
    strategies: list[Strategy] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    events: list[Moment | Observation] = field(default_factory=list)  # all that the pacer was given, in order

    @property
    def switches(self) -> int:
        return sum(a != b for a, b in zip(self.strategies, self.strategies[1:], strict=False))


def long_tailed(count: int, mean: int, seed: int = 0, longest: int = 4096) -> list[int]:
    rng = random.Random(seed)
    return [max(8, min(longest, int(rng.lognormvariate(np.log(mean) - 0.5, 1.0)))) for _ in range(count)]


def simulate(world: World, pacer: Pacer, lengths: list[int], seed: int = 0, ahead: int = 4, prompt: int = 128, slots: int = 256) -> Outcome:
    rng = np.random.default_rng(seed)
    outcome, unread = Outcome(), deque()
    waiting = deque(lengths)
    left = np.zeros(0, dtype=np.int64)
    context = np.zeros(0)
    drafter, moment, step = "", None, 0
    while len(left) or waiting:
        room = slots - len(left)
        new = [waiting.popleft() for _ in range(min(room, len(waiting)))]
        if new or moment is None or moment.running != len(left) or step % 16 == 0:
            left, context = np.concatenate((left, new)).astype(np.int64), np.concatenate((context, np.full(len(new), float(prompt))))
            moment = Moment(len(left), float(context.mean()))
        decision = pacer.choose(moment)
        outcome.events.append(moment)
        strategy = decision.strategy
        rows, mean = len(left), float(context.mean())
        gained, accepted = np.ones(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
        draft_seconds, switched = 0.0, False
        if strategy.count:
            simulated = world.drafters[strategy.drafter]
            rates = [simulated.acceptance(d, mean, step) for d in range(1, strategy.count + 1)]
            accepted = np.cumprod(rng.random((rows, strategy.count)) < rates, axis=1).sum(1)
            gained += accepted
            draft_seconds = simulated.seconds(strategy.count, world.bucket(rows))
            switched = drafter != strategy.drafter
            draft_seconds += simulated.switch_seconds if switched else 0.0
        drafter = strategy.drafter
        gained = np.minimum(gained, left)
        verify_seconds = world.verify_seconds(rows, strategy.queries, mean)
        noise = (1 + world.noise * rng.standard_normal()) * (3.0 if rng.random() < world.outliers else 1.0)
        accepted_at = tuple(int((accepted > i).sum()) for i in range(strategy.count))
        drafts = rows if strategy.count else 0
        unread.append(Observation(decision, rows, mean, draft_seconds, verify_seconds * noise, int(gained.sum()), drafts, accepted_at, switched))
        while len(unread) > ahead:
            outcome.events.append(unread[0])
            pacer.observe(unread.popleft())
        outcome.seconds += draft_seconds + verify_seconds
        outcome.step_seconds.append(draft_seconds + verify_seconds)
        outcome.strategies.append(strategy)
        outcome.decisions.append(decision)
        outcome.running.append(rows)
        left, context = left - gained, context + gained
        left, context = left[left > 0], context[: len(left)][left > 0]
        step += 1
    return outcome


class BestPacer:
    """Knows the world: the best strategy for each context, without having to find out."""

    def __init__(self, world: World, strategies: list[Strategy]) -> None:
        self.world, self.strategies, self.step = world, [PLAIN, *strategies], 0

    def choose(self, moment: Moment) -> Decision:
        self.step += 1
        return Decision(max(self.strategies, key=lambda s: self.world.rate(s, moment.running, moment.context, self.step)))

    def observe(self, observation: Observation) -> None:
        pass
