"""What `paceline bench rollout` makes of a rollout's statistics."""

from paceline.bench.rollout import step_ms_by_running
from paceline.stats import RolloutStats


def test_steps_are_told_by_how_many_rows_ran():
    stats = RolloutStats(running=[3, 4, 1, 1], step_seconds=[0.010, 0.020, 0.004, 0.006])
    assert step_ms_by_running(stats) == {1: 5.0, 4: 15.0}


def test_no_times_are_told_where_one_step_has_anothers():
    stats = RolloutStats(running=[3, 4, 1], step_seconds=[0.010, -0.150, 0.700])
    assert step_ms_by_running(stats) == {}
