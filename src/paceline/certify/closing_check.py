"""The closing check of a run: one more step's rollout, plain and with speculation, on the same seeds.

The drafter starts each repetition from the same state, and that state has never seen these responses.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.backend import Backend
from paceline.types import Group

REPEATS = 2


@dataclass(frozen=True)
class SpeculationCheck:
    """One step's rollout with and without speculation: time, decode steps, and whether tokens agree."""

    plain_seconds: float
    paced_seconds: float
    plain_steps: int
    paced_steps: int
    accept_length: float  # tokens per draft, the policy's own included, in the steps that speculated
    identical: bool | None  # None: `verify: rejection` does not promise it

    @property
    def ratio(self) -> float:
        """How many times as fast the rollout was with speculation."""
        return self.plain_seconds / self.paced_seconds


def check_speculation(backend: Backend, roll_out: Callable[[], Sequence[Group]]) -> SpeculationCheck | None:
    """Runs `roll_out` several times with and without speculation; None where the backend never speculates."""
    speculation = backend.speculation
    if speculation is None or speculation.pacer is None:
        return None
    pacer = speculation.pacer
    drafters = speculation.drafter_state()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    completions, stats = {}, {}
    for _ in range(REPEATS):
        for paced in (True, False):
            speculation.load_drafter_state(drafters)
            speculation.pacer = pacer if paced else None
            backend.take_stats()
            start = time.perf_counter()
            groups = roll_out()
            seconds[paced].append(time.perf_counter() - start)
            completions[paced] = _outputs(groups)
            stats[paced] = backend.take_stats()
    speculation.pacer = pacer
    drafts = stats[True].drafts.values()
    return SpeculationCheck(
        plain_seconds=statistics.median(seconds[False]),
        paced_seconds=statistics.median(seconds[True]),
        plain_steps=len(stats[False].running),
        paced_steps=len(stats[True].running),
        accept_length=1 + sum(d.accepted for d in drafts) / max(1, sum(d.drafts for d in drafts)),
        identical=completions[True] == completions[False] if speculation.keeps_tokens else None,
    )


def _outputs(groups: Sequence[Group]) -> list[tuple]:
    return [
        (sample.completion.tokens, sample.completion.logprobs) for group in groups for sample in group.samples
    ]
