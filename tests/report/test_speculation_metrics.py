"""What a step's record says of speculation: sums over drafters, and each drafter by position."""

import pytest

from paceline.pacing.strategy import PLAIN, Decision, Observation, Strategy
from paceline.report.metrics import rollout_metrics, speculation_metrics
from paceline.stats import RolloutStats
from paceline.types import Completion, FinishReason, Group, Request, Sample, SamplingParams, Score


def observation(
    strategy: Strategy, tokens: int, drafts: int = 0, accepted_at: tuple[int, ...] = (), proposed: int = 0
) -> Observation:
    return Observation(
        Decision(strategy),
        4,
        100.0,
        0.25 if strategy.count else 0.0,
        1.0,
        tokens,
        drafts,
        accepted_at,
        proposed=proposed,
    )


def test_speculation_metrics_are_by_drafter_and_position():
    stats = RolloutStats()
    stats.note(observation(PLAIN, 4))
    assert speculation_metrics(stats) == {}, "nothing was proposed"
    stats.note(observation(Strategy("eagle", 3), 9, 4, (3, 1, 1), 12))
    stats.note(observation(Strategy("eagle", 2), 4, 2, (1, 1), 4))
    stats.note(observation(Strategy("history", 1), 5, 4, (1,), 2))
    values = speculation_metrics(stats)
    assert values["speculation/proposed"] == 4 * 3 + 2 * 2 + 2, "of four drafts two were empty"
    assert values["speculation/accepted"] == pytest.approx((5 + 2 + 1) / 18)
    assert values["speculation/accept_length"] == pytest.approx(1 + 8 / 10)
    assert values["speculation/steps"] == 0.75
    assert values["speculation/eagle/accept_length"] == pytest.approx(1 + 7 / 6)
    assert [values[f"speculation/eagle/accepted_{i}"] for i in (1, 2, 3)] == pytest.approx(
        [4 / 6, 2 / 6, 1 / 6]
    )
    assert values["speculation/history/accepted_1"] == 0.25 and "speculation/history/accepted_2" not in values
    assert values["time/drafting"] == 0.75 and values["time/verifying"] == 4.0


def test_rollout_metrics_report_the_graph_pool_if_there_is_one():
    completion = Completion(
        Request("train/1", (1, 2), 0, SamplingParams()), (3,), (-0.5,), FinishReason.STOP, ()
    )
    groups = [Group("0", (Sample(completion, Score(1.0, True)),))]
    assert "memory/graph_pool_gb" not in rollout_metrics(groups, RolloutStats())
    assert rollout_metrics(groups, RolloutStats(graph_pool_bytes=480_000_000))["memory/graph_pool_gb"] == 0.48
