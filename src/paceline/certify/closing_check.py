"""The closing check of a run: one more step's rollout, plain and with speculation, on the same seeds.

Both are made several times in turn, each pair in the other order than the one before, so that a machine that
slows down or speeds up meanwhile does so for both. Drafters and the pacer start each repetition from the same
state, and that state has never seen these responses. Pairs that agree closely end the check early.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

from paceline.backend import Backend, Speculation
from paceline.stats import RolloutStats
from paceline.types import Group

# Pairs of rollouts, at most: the true median lies between the lowest and the highest of five ratios with a
# probability of 94%, whatever their distribution (1 - 2 / 2**5).
PAIRS = 5

# Student's t by the pairs that there are, for an interval of 97.5%. Ending where it happens to be tight costs
# some of that: over all checks about 93% of the intervals hold the true ratio under normal noise (the tests
# simulate it), less where noise has two sizes.
STUDENT_T = {3: 6.205, 4: 4.177}
# The half width, as a share of the ratio, from which no further pair is needed.
TIGHT = 0.05

# Pairs that are made however long they take, and the seconds after which no further one begins.
LEAST_PAIRS = 2
SECONDS = 30.0
# Pairs after which it may end because they agree: three do so by chance too often.
AGREEING_PAIRS = 4


@dataclass(frozen=True)
class SpeculationCheck:
    """One step's rollout with and without speculation: times of each pair, decode steps, and the tokens."""

    plain: tuple[float, ...]  # seconds, by pair
    paced: tuple[float, ...]
    plain_steps: int
    paced_steps: int  # median over the pairs: a pacer that measures times may decide differently
    accept_length: float  # tokens per draft, the policy's own included, in the steps that speculated
    identical: bool | None  # None: `verify: rejection` does not promise it

    @property
    def ratios(self) -> list[float]:
        """How many times as fast the rollout was with speculation, by pair."""
        return [plain / paced for plain, paced in zip(self.plain, self.paced, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """The ends between which the true ratio lies (`ratio_interval`)."""
        return ratio_interval(self.ratios)

    @property
    def too_noisy(self) -> bool:
        """Whether it may be faster or slower, or there are too few pairs to decide."""
        low, high = self.interval
        return len(self.ratios) < min(STUDENT_T) or low <= 1.0 <= high

    def record(self) -> dict[str, Any]:
        low, high = self.interval
        spread = {"ratio": self.ratio, "ratio_low": low, "ratio_high": high}
        return asdict(self) | spread | {"repeats": len(self.plain), "too_noisy": self.too_noisy}


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Returns where the true ratio lies: Student's t for few pairs, the range of them for `PAIRS` or more.

    Of fewer than three pairs it is the range, too, which has no stated confidence.
    """
    if len(ratios) not in STUDENT_T:
        return min(ratios), max(ratios)
    logs = [math.log(ratio) for ratio in ratios]
    half = STUDENT_T[len(ratios)] * statistics.stdev(logs) / math.sqrt(len(logs))
    centre = statistics.fmean(logs)
    return math.exp(centre - half), math.exp(centre + half)


def check_speculation(
    backend: Backend, roll_out: Callable[[], Sequence[Group]], pairs: int = PAIRS
) -> SpeculationCheck | None:
    """Runs `roll_out` up to `pairs` times each way; returns None if the backend never speculates.

    It ends when the ratio is known well enough, or when `SECONDS` have passed.
    """
    speculation = backend.speculation
    if speculation is None or speculation.pacer is None or not pairs:
        return None
    timed = _TimedRollouts(backend, speculation, roll_out)
    begun = time.perf_counter()
    for pair in range(pairs):
        if pair >= LEAST_PAIRS and (timed.is_tight or time.perf_counter() - begun > SECONDS):
            break
        for paced in (True, False) if pair % 2 == 0 else (False, True):
            timed.run(paced)
    drafts = timed.stats[True][-1].drafts.values()
    steps = {paced: [len(stats.running) for stats in timed.stats[paced]] for paced in (True, False)}
    return SpeculationCheck(
        plain=tuple(timed.seconds[False]),
        paced=tuple(timed.seconds[True]),
        plain_steps=round(statistics.median(steps[False])),
        paced_steps=round(statistics.median(steps[True])),
        accept_length=1 + sum(d.accepted for d in drafts) / max(1, sum(d.drafts for d in drafts)),
        identical=timed.identical if speculation.keeps_tokens else None,
    )


class _TimedRollouts:
    """Rollouts with a copy of the pacer and without it; it is put back after each. Times, statistics, tokens.

    A pacer that kept learning would know the step's acceptance from the second repetition on.
    """

    def __init__(
        self, backend: Backend, speculation: Speculation, roll_out: Callable[[], Sequence[Group]]
    ) -> None:
        self.backend = backend
        self.speculation = speculation
        self.roll_out = roll_out
        self.drafters = speculation.drafter_state()
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.stats: dict[bool, list[RolloutStats]] = {True: [], False: []}
        self.identical = True
        self._outputs: list[tuple] | None = None

    @property
    def is_tight(self) -> bool:
        """Whether the pairs so far determine the ratio well enough."""
        ratios = [plain / paced for plain, paced in zip(self.seconds[False], self.seconds[True], strict=True)]
        low, high = ratio_interval(ratios)
        return AGREEING_PAIRS <= len(ratios) < PAIRS and high / low <= (1 + TIGHT) ** 2

    def run(self, paced: bool) -> None:
        pacer = self.speculation.pacer
        self.speculation.load_drafter_state(self.drafters)
        self.backend.take_stats()
        try:
            self.speculation.pacer = deepcopy(pacer) if paced else None
            start = time.perf_counter()
            groups = self.roll_out()
            self.seconds[paced].append(time.perf_counter() - start)
        finally:
            self.speculation.pacer = pacer
        self.stats[paced].append(self.backend.take_stats())
        outputs = _outputs(groups)
        self.identical &= self._outputs is None or outputs == self._outputs
        self._outputs = outputs


def _outputs(groups: Sequence[Group]) -> list[tuple]:
    return [
        (sample.completion.tokens, sample.completion.logprobs) for group in groups for sample in group.samples
    ]
