"""The closing check of a run: one more step's rollout, plain and with speculation, on the same seeds.

Both are made several times in turn, each pair in the other order than the one before, so that a machine that
slows down or speeds up meanwhile does so for both. The drafter starts each repetition from the same state,
and that state has never seen these responses.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.backend import Backend, Speculation
from paceline.stats import RolloutStats
from paceline.types import Group

# Pairs of rollouts: the true median lies between the lowest and the highest of five ratios with a
# probability of 94%, whatever their distribution (1 - 2 / 2**5).
PAIRS = 5

# Pairs that are made however long they take, and the seconds after which no further one begins.
# With fewer than `PAIRS` of them nothing is claimed about speed.
LEAST_PAIRS = 2
SECONDS = 60.0


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
        """The median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def too_noisy(self) -> bool:
        """Whether some pairs say faster and others slower, or there are too few of them to say anything."""
        return len(self.ratios) < PAIRS or min(self.ratios) <= 1.0 <= max(self.ratios)

    def record(self) -> dict[str, Any]:
        """Returns the check as JSON takes it."""
        spread = {"ratio": self.ratio, "ratio_low": min(self.ratios), "ratio_high": max(self.ratios)}
        return asdict(self) | spread | {"repeats": len(self.plain), "too_noisy": self.too_noisy}


def check_speculation(
    backend: Backend, roll_out: Callable[[], Sequence[Group]], pairs: int = PAIRS
) -> SpeculationCheck | None:
    """Runs `roll_out` several times with and without speculation; None where the backend never speculates."""
    speculation = backend.speculation
    if speculation is None or speculation.pacer is None or not pairs:
        return None
    timed = _TimedRollouts(backend, speculation, roll_out)
    begun = time.perf_counter()
    for pair in range(pairs):
        if pair >= LEAST_PAIRS and time.perf_counter() - begun > SECONDS:
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
    """Rollouts with and without the pacer, which is put back after each: times, statistics, tokens."""

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

    def run(self, paced: bool) -> None:
        """Makes one rollout."""
        pacer = self.speculation.pacer
        self.speculation.load_drafter_state(self.drafters)
        self.backend.take_stats()
        try:
            self.speculation.pacer = pacer if paced else None
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
