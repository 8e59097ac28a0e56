"""The closing check of a run: one more step's rollout, plain and with speculation, on the same seeds and
weights.

The drafter starts each repetition from the same state, and that state has never seen these responses.
"""

import statistics
import time
from dataclasses import dataclass

from paceline.engine.engine import Engine
from paceline.session import Session
from paceline.tasks.order import ProblemOrder
from paceline.types import Group, Purpose

REPEATS = 2


@dataclass(frozen=True)
class SpeculationCheck:
    plain_seconds: float
    paced_seconds: float
    plain_steps: int
    paced_steps: int
    accept_length: float  # tokens per draft, the policy's own included, in the steps that speculated
    identical: bool | None  # None: `verify: rejection` does not promise it

    @property
    def ratio(self) -> float:
        return self.plain_seconds / self.paced_seconds


def check_speculation(session: Session, position: int, step: int) -> SpeculationCheck | None:
    """None where the backend does not speculate."""
    engine = session.backend
    if not isinstance(engine, Engine) or engine.pacer is None:
        return None
    rollout = session.config.rollout
    problems = ProblemOrder(session.task.train, session.config.run.seed, position).take(
        rollout.prompts_per_step
    )
    pacer, drafters = engine.pacer, engine.drafter_state()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    completions, stats = {}, {}
    for _ in range(REPEATS):
        for paced in (True, False):
            engine.load_drafter_state(drafters)
            engine.pacer = pacer if paced else None
            engine.take_stats()
            start = time.perf_counter()
            groups = session.sampler.sample(
                problems, Purpose.TRAIN, step, rollout.samples_per_prompt, session.train_sampling()
            )
            seconds[paced].append(time.perf_counter() - start)
            completions[paced], stats[paced] = _outputs(groups), engine.take_stats()
    engine.pacer = pacer
    drafts = stats[True].drafts.values()
    return SpeculationCheck(
        plain_seconds=statistics.median(seconds[False]),
        paced_seconds=statistics.median(seconds[True]),
        plain_steps=len(stats[False].running),
        paced_steps=len(stats[True].running),
        accept_length=1 + sum(d.accepted for d in drafts) / max(1, sum(d.drafts for d in drafts)),
        identical=completions[True] == completions[False]
        if engine.settings.verify == "shared-noise"
        else None,
    )


def _outputs(groups: list[Group]) -> list[tuple]:
    return [(s.completion.tokens, s.completion.logprobs) for group in groups for s in group.samples]
