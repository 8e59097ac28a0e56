"""The pacer's decisions, recorded: a change that should not change them does not.

A world without a clock, computed with +, -, * and / alone from Python's own random numbers, so that it is
the same on every machine. Compared are strategies and reasons, and expected rates to five digits: the last
bits of numpy's logarithms and sums may differ between machines. The decisions here stay the same if every
time is changed by one part in 1e9.

If decisions are meant to change, run this file as a script (`python -m tests.pacing.test_decisions`) and put
what it prints in place of `RECORDED`.
"""

import json
import random

import pytest

from paceline.pacing.adaptive import AdaptivePacer
from paceline.pacing.settings import PacingSettings
from paceline.pacing.strategy import Decision, Moment, Observation, Strategy

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
REPORT_DELAY = 4


class RecordedWorld:
    """Two rollouts that shrink from 48 rows to one; which of two drafters is better changes in them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.active = ""
        self.step = 0

    def moments(self):
        """Yields the moment of each step; the same object as long as the batch is the same."""
        for _ in range(2):
            context = 120.0
            for running, steps in ((48, 60), (31, 80), (12, 120), (5, 160), (2, 200), (1, 200)):
                for first in range(0, steps, 20):
                    moment = Moment(running, context + first, 8 if running > 40 else 16)
                    for _ in range(20):
                        yield moment
                context += 3 * steps

    def acceptance(self, drafter: str) -> float:
        if drafter == "copy":
            return 0.9 if self.step % 700 > 330 else 0.0
        return 0.8

    def run(self, decision: Decision, moment: Moment) -> Observation:
        """Returns what a step does: its time rises with tokens and context, with noise and rare outliers."""
        rng, running, strategy = self.rng, moment.running, decision.strategy
        bucket = next(b for b in BUCKETS if b >= running)
        verify = 4e-3 + 9e-5 * bucket * strategy.queries + 1.3e-8 * running * moment.context
        verify *= 0.97 + 0.06 * rng.random()
        draft = 0.0
        accepted_at = []
        switched = bool(strategy.count) and strategy.drafter != self.active
        if strategy.count:
            draft = 3.1e-5 if strategy.drafter == "copy" else 1.7e-4 * strategy.count
            draft += 7.3e-3 if switched and strategy.drafter == "head" else 0.0
            left = running
            for _ in range(strategy.count):
                left = sum(rng.random() < self.acceptance(strategy.drafter) for _ in range(left))
                accepted_at.append(left)
        disturbed = rng.random() < 0.02
        verify += 0.03 if disturbed else 0.0
        self.active = strategy.drafter
        self.step += 1
        return Observation(
            decision=decision,
            running=running,
            context=moment.context,
            draft_seconds=draft,
            verify_seconds=verify,
            tokens=running + sum(accepted_at),
            drafts=running if strategy.count else 0,
            accepted_at=tuple(accepted_at),
            switched=switched,
            disturbed=disturbed,
        )


def make_pacer() -> AdaptivePacer:
    strategies = tuple(Strategy(drafter, count) for drafter in ("head", "copy") for count in (1, 2, 3, 5, 7))
    return AdaptivePacer(PacingSettings(BUCKETS, strategies, seed=5, catch_up={"head": 0.01}))


def decide(seed: int = 1) -> list[tuple[int, Decision]]:
    """Returns every decision and its step; on the way times are forgotten, and later a state is reloaded."""
    world, pacer = RecordedWorld(seed), make_pacer()
    unread: list[Observation] = []
    decisions: list[tuple[int, Decision]] = []
    for step, moment in enumerate(world.moments()):
        if step == 500:
            while unread:
                pacer.observe(unread.pop(0))
            pacer.forget_times()
        if step == 1300:
            unread.clear()
            state = json.loads(json.dumps(pacer.state()))
            pacer = make_pacer()
            pacer.load_state(state)
        decision = pacer.choose(moment)
        if not decisions or decision is not decisions[-1][1]:
            decisions.append((step, decision))
        unread.append(world.run(decision, moment))
        if len(unread) > REPORT_DELAY:
            pacer.observe(unread.pop(0))
    return decisions


def changes(decisions: list[tuple[int, Decision]]) -> list[tuple[int, str, str, float]]:
    """Returns (step, strategy, reason, expected rate) where strategy or reason changes."""
    told: list[tuple[int, str, str, float]] = []
    for step, decision in decisions:
        strategy, reason = str(decision.strategy), decision.reason
        if not told or told[-1][1:3] != (strategy, reason):
            told.append((step, strategy, reason, float(f"{decision.expected:.6g}")))
    return told


# Decisions in all, with those that repeat the one before.
RECORDED_COUNT = 154
# (step, strategy, reason, expected tokens per second) where strategy or reason changes.
RECORDED = [
    (0, "plain", "best", 0.0),
    (8, "copy:1", "trial", 0.0),
    (10, "plain", "best", 4921.46),
    (164, "copy:1", "trial", 1746.99),
    (166, "plain", "best", 2174.77),
    (332, "copy:1", "trial", 918.965),
    (339, "copy:2", "best", 1411.4),
    (343, "copy:5", "trial", 1971.5),
    (346, "copy:7", "best", 2663.52),
    (500, "plain", "best", 0.0),
    (508, "copy:7", "trial", 889.148),
    (511, "copy:5", "best", 906.996),
    (515, "copy:7", "best", 1869.47),
    (764, "copy:5", "trial", 319.195),
    (767, "copy:7", "best", 326.628),
    (787, "plain", "trial", 241.382),
    (790, "copy:7", "best", 289.436),
    (794, "plain", "guard", 247.53),
    (810, "plain", "best", 241.184),
    (820, "head:1", "trial", 0.0),
    (822, "plain", "best", 5034.22),
    (826, "copy:1", "trial", 3040.22),
    (828, "head:1", "best", 5342.77),
    (832, "head:2", "trial", 5343.99),
    (835, "head:1", "best", 5410.1),
    (880, "head:3", "trial", 5649.22),
    (883, "head:2", "best", 5805.88),
    (891, "head:1", "trial", 5568.48),
    (894, "head:2", "best", 5761.19),
    (898, "copy:1", "trial", 3181.53),
    (900, "head:2", "best", 5807.08),
    (960, "head:1", "trial", 3035.79),
    (963, "copy:7", "best", 3954.88),
    (967, "copy:5", "trial", 3945.79),
    (970, "copy:7", "best", 3143.94),
    (974, "head:2", "trial", 3133.07),
    (977, "head:3", "best", 3194.42),
    (1049, "copy:1", "trial", 2201.26),
    (1052, "head:3", "best", 3285.1),
    (1056, "copy:3", "best", 3480.45),
    (1080, "copy:5", "trial", 2712.05),
    (1083, "copy:7", "best", 2746.41),
    (1428, "head:7", "guard", 1151.92),
    (1440, "copy:7", "best", 1043.42),
    (1488, "head:7", "best", 681.573),
    (1584, "head:3", "trial", 595.276),
    (1587, "head:7", "best", 619.883),
    (1591, "head:5", "best", 627.96),
]


def test_decisions_equal_the_recorded_ones():
    decisions = decide()
    told = changes(decisions)
    assert [entry[:3] for entry in told] == [entry[:3] for entry in RECORDED]
    assert [entry[3] for entry in told] == pytest.approx([entry[3] for entry in RECORDED], rel=1e-5)
    assert len(decisions) == RECORDED_COUNT


def test_recorded_decisions_show_every_kind():
    kinds = {(reason, strategy.partition(":")[0]) for _, strategy, reason, _ in RECORDED}
    drafters = ("plain", "head", "copy")
    assert kinds >= {(reason, drafter) for reason in ("best", "trial") for drafter in drafters}
    assert ("guard", "plain") in kinds and ("guard", "head") in kinds


if __name__ == "__main__":
    recorded = decide()
    print(f"RECORDED_COUNT = {len(recorded)}")
    print("RECORDED = [")
    for entry in changes(recorded):
        print(f"    {entry},")
    print("]")
