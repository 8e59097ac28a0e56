"""A machine and drafters that are known exactly, with a simulated clock: what pacers are measured against.

A step's time is a smooth roofline in bucket * queries plus a part for attended tokens, seen through noise and
outliers. A drafter is its acceptance (by depth, context and step), its seconds, and what catching up costs.
Outcomes reach the pacer `ahead` steps late, as they do in an engine that launches ahead, and rows that have
ended run so many steps more. Which positions are hard is drawn before anybody runs, so strategies are
compared on the same luck.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from paceline.pacing.strategy import PLAIN, TRAIN, Decision, Moment, Observation, Pacer, Strategy

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
DEEPEST = 15


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
    buckets: tuple[int, ...] = BUCKETS
    max_tokens: int = 1 << 30  # of one step, by the memory for captured graphs
    # in a rollout's first step of each (bucket, queries): the pacer sees it, no strategy is charged for it
    capture_seconds: float = 0.0

    def bucket(self, running: int) -> int:
        return next(b for b in self.buckets if b >= running)

    def max_queries(self, running: int) -> int:
        return max(1, self.max_tokens // self.bucket(running))

    def verify_seconds(self, running: int, queries: int, context: float) -> float:
        tokens = self.bucket(running) * queries
        roofline = (self.weights_seconds**4 + (tokens * self.token_seconds) ** 4) ** 0.25
        return roofline + self.attention_seconds * running * context

    def rate(self, strategy: Strategy, running: int, context: float, step: int) -> float:
        """Returns the true expected tokens per second."""
        seconds = self.verify_seconds(running, strategy.queries, context)
        emitted = 1.0
        reach = 1.0
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


class Rows:
    """The requests in order of arrival; `slots` of them run at a time."""

    def __init__(
        self, lengths: list[int], prompt: int, slots: int, ahead: int, rng: np.random.Generator
    ) -> None:
        self.prompt = prompt
        self.slots = slots
        self.ahead = ahead
        self.length = np.array(lengths)
        self.done = np.zeros(len(lengths), dtype=np.int64)
        # The step that ended each row; -1 while it runs.
        self.ended = np.full(len(lengths), -1)
        self.hardness = rng.random((len(lengths), max(lengths) + DEEPEST), dtype=np.float32)
        # The first row that has not been admitted.
        self.waiting = 0
        self.running = np.zeros(0, dtype=np.int64)
        self.changed = False

    def admit(self, step: int) -> None:
        """Drops rows that have ended, fills their slots, and sets `changed` if the batch is another now."""
        ended = self.ended[self.running]
        staying = self.running[(ended < 0) | (ended + self.ahead >= step)]
        entering = np.arange(self.waiting, min(len(self.length), self.waiting + self.slots - len(staying)))
        self.changed = len(staying) < len(self.running) or len(entering) > 0
        self.running = np.concatenate((staying, entering))
        self.waiting += len(entering)

    def context(self) -> float:
        return self.prompt + float(self.done[self.running].mean())

    def accepted(self, rates: list[float]) -> np.ndarray:
        """Returns the accepted tokens of each running row's proposal, by the acceptance at each depth."""
        position = self.done[self.running][:, None] + np.arange(len(rates))
        return np.cumprod(self.hardness[self.running[:, None], position] < rates, axis=1).sum(1)

    def advance(self, gained: np.ndarray, step: int) -> np.ndarray:
        """Adds tokens to the running rows, none beyond their length, and returns what each has gained."""
        gained = np.minimum(gained, (self.length - self.done)[self.running])
        self.done[self.running] += gained
        over = self.running[self.done[self.running] == self.length[self.running]]
        self.ended[over[self.ended[over] < 0]] = step
        return gained


def simulate(
    world: World,
    pacer: Pacer,
    lengths: list[int],
    seed: int = 0,
    ahead: int = 4,
    prompt: int = 128,
    slots: int = 256,
    workload: str = TRAIN,
) -> Outcome:
    """Returns what happens to requests of the given lengths; outcomes reach the pacer `ahead` steps late."""
    rng = np.random.default_rng(seed)
    rows = Rows(lengths, prompt, slots, ahead, rng)
    outcome = Outcome()
    unread: deque[Observation] = deque()
    captured: set[tuple[int, int]] = set()
    drafter = ""
    moment = None
    step = 0
    looked = 0
    while True:
        rows.admit(step)
        running = len(rows.running)
        if not running:
            return outcome
        if rows.changed or step - looked == 16:
            moment = Moment(running, rows.context(), world.max_queries(running), workload)
            looked = step
        decision = pacer.choose(moment)
        outcome.events.append(moment)
        strategy = decision.strategy
        mean = rows.context()
        bucket = world.bucket(running)
        accepted = np.zeros(running, dtype=np.int64)
        draft_seconds = 0.0
        switched = False
        if strategy.count:
            simulated = world.drafters[strategy.drafter]
            accepted = rows.accepted(
                [simulated.acceptance(d, mean, step) for d in range(1, strategy.count + 1)]
            )
            draft_seconds = simulated.seconds(strategy.count, bucket)
            switched = drafter != strategy.drafter
            draft_seconds += simulated.switch_seconds if switched else 0.0
        drafter = strategy.drafter
        gained = rows.advance(accepted + 1, step)
        accepted_at = tuple(int((gained > i + 1).sum()) for i in range(strategy.count))
        drafts = int((gained > 0).sum()) if strategy.count else 0
        verify_seconds = world.verify_seconds(running, strategy.queries, mean)
        outcome.seconds += draft_seconds + verify_seconds
        outcome.step_seconds.append(draft_seconds + verify_seconds)
        seen = (
            verify_seconds
            * (1 + world.noise * rng.standard_normal())
            * (3.0 if rng.random() < world.outliers else 1.0)
        )
        disturbed = world.capture_seconds > 0 and (bucket, strategy.queries) not in captured
        if disturbed:
            captured.add((bucket, strategy.queries))
            seen += world.capture_seconds
        unread.append(
            Observation(
                decision,
                running,
                mean,
                draft_seconds,
                seen,
                int(gained.sum()),
                drafts,
                accepted_at,
                switched,
                disturbed,
            )
        )
        while len(unread) > ahead:
            outcome.events.append(unread[0])
            pacer.observe(unread.popleft())
        outcome.strategies.append(strategy)
        outcome.decisions.append(decision)
        outcome.running.append(running)
        step += 1


class BestPacer:
    """A pacer that knows the world: it runs the best strategy for each context without finding out."""

    def __init__(self, world: World, strategies: list[Strategy]) -> None:
        self.world = world
        self.strategies = [PLAIN, *strategies]
        self.step = 0

    def choose(self, moment: Moment) -> Decision:
        self.step += 1
        allowed = [s for s in self.strategies if s.queries <= moment.max_queries]
        return Decision(
            max(allowed, key=lambda s: self.world.rate(s, moment.running, moment.context, self.step))
        )

    def observe(self, observation: Observation) -> None:
        pass
