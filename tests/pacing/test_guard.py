"""The guard compares what a drafter did with what plain decoding would have taken."""

from paceline.pacing.blocks import BlockSummary
from paceline.pacing.cost import CostModel
from paceline.pacing.guard import Guard, lost_seconds
from paceline.pacing.situation import situation_of
from tests.pacing.world import BUCKETS

HERE = situation_of(4, 300)


def known_cost() -> CostModel:
    """A machine on which plain decoding of four rows takes 5 ms."""
    cost = CostModel(BUCKETS, [1, 2])
    cost.update_verify(4, 1, 300, 5e-3, 16)
    return cost


def block(steps: int, step_seconds: float, tokens_per_row: float) -> BlockSummary:
    return BlockSummary(
        steps, 4, 300.0, steps * step_seconds, steps * tokens_per_row, 4 * steps, (2 * steps,)
    )


def test_lost_seconds_are_counted_in_steps_of_plain_decoding():
    cost = known_cost()
    assert abs(lost_seconds([block(10, 6e-3, 1.0)], cost) - 10e-3) < 1e-9
    assert abs(lost_seconds([block(10, 6e-3, 1.5), block(4, 6e-3, 1.0)], cost) - (-15e-3 + 4e-3)) < 1e-9


def test_guard_is_satisfied_after_long_enough_in_one_situation():
    cost, guard = known_cost(), Guard()
    for _ in range(4):
        assert not guard.is_doing_well(cost, HERE) and not guard.slow_blocks(cost), "too early to say"
        guard.add(block(16, 6e-3, 1.5))
    assert guard.is_doing_well(cost, HERE) and not guard.is_doing_well(cost, situation_of(64, 300))
    guard.add(block(16, 6e-3, 1.0))
    assert guard.slow_blocks(cost), "the last steps count"


def test_guard_takes_longer_to_stop_a_slightly_slow_drafter_than_a_very_slow_one():
    cost, guard = known_cost(), Guard()
    bad, poor = block(16, 6e-3, 1.0), block(16, 5.2e-3, 1.0)
    guard.add(bad)
    assert guard.slow_blocks(cost) == [bad]
    guard.clear()
    for _ in range(3):
        guard.add(poor)
        assert not guard.slow_blocks(cost)
    guard.add(poor)
    assert guard.slow_blocks(cost) == [poor] * 4


def test_guard_drops_old_blocks():
    cost, guard = known_cost(), Guard()
    for _ in range(8):
        guard.add(block(16, 6e-3, 1.0))
    for _ in range(4):
        guard.add(block(16, 6e-3, 1.5))
    assert not guard.slow_blocks(cost) and guard.is_doing_well(cost, HERE)
