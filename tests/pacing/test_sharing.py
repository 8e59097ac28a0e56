"""Pacers that share what they learnt: nothing is counted twice, and what one knows all know."""

import json

from paceline.pacing.adaptive import AdaptivePacer
from paceline.pacing.settings import PacingSettings
from paceline.pacing.sharing import load_pacing_state, merge_pacing, pacing_state
from paceline.pacing.strategy import Moment, Observation, Strategy

HISTORY = Strategy.parse("history:4")


def pacer_that_saw(seconds: float, accepted: int, steps: int = 400) -> AdaptivePacer:
    pacer = AdaptivePacer(PacingSettings((8, 16), (HISTORY,)))
    moment = Moment(running=8, context=100.0, max_queries=16)
    for _ in range(steps):
        decision = pacer.choose(moment)
        count = decision.strategy.count
        pacer.observe(
            Observation(
                decision,
                running=8,
                context=100.0,
                drafts=8 if count else 0,
                proposed=8 * count,
                accepted_at=tuple(accepted for _ in range(count)),
                draft_seconds=0.0001 if count else 0.0,
                verify_seconds=seconds,
                tokens=8 + (accepted * count if count else 0),
            )
        )
    pacer.choose(Moment(running=16, context=100.0, max_queries=16))
    return pacer


def test_merge_pacing_of_equal_states_changes_nothing():
    state = pacing_state(pacer_that_saw(0.002, 6))
    assert merge_pacing([state, state, state]) == state
    json.dumps(state)


def test_merge_pacing_shares_what_one_replica_measured():
    slow, fresh = pacer_that_saw(0.004, 3), AdaptivePacer(PacingSettings((8, 16), (HISTORY,)))
    merged = merge_pacing([pacing_state(slow), pacing_state(fresh)])
    load_pacing_state(fresh, merged)
    assert fresh.cost.plain_seconds(8, 100.0) == slow.cost.plain_seconds(8, 100.0) > 0


def test_merged_times_lie_between_the_measured_ones():
    fast, slow = pacer_that_saw(0.002, 6), pacer_that_saw(0.006, 6)
    other = AdaptivePacer(PacingSettings((8, 16), (HISTORY,)))
    load_pacing_state(other, merge_pacing([pacing_state(fast), pacing_state(slow)]))
    low, high = fast.cost.plain_seconds(8, 100.0), slow.cost.plain_seconds(8, 100.0)
    assert low < other.cost.plain_seconds(8, 100.0) < high
    load_pacing_state(None, None)  # a pacer that does not learn has nothing to take over
