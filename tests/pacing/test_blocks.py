"""What the pacer reads from the steps of one decision."""

import pytest

from paceline.pacing.blocks import Block, split_into_blocks
from paceline.pacing.cost import CostModel
from paceline.pacing.strategy import PLAIN, Decision, Observation, Strategy
from tests.pacing.world import BUCKETS

DECISION = Decision(Strategy("eagle", 2), reason="best")


def step(draft_ms: float = 1.0, verify_ms: float = 5.0, **changes) -> Observation:
    """A step of four rows of which three had a first token accepted, and one of these a second."""
    fields = dict(tokens=8, drafts=4, accepted_at=(3, 1), decision=DECISION) | changes
    return Observation(
        running=4, context=300.0, draft_seconds=1e-3 * draft_ms, verify_seconds=1e-3 * verify_ms, **fields
    )


def test_blocks_are_split_where_the_decision_changes():
    again = Decision(Strategy("eagle", 2), reason="best")  # equal, but another decision
    observed = [step(), step(), step(decision=again), step()]
    assert [block.steps for block in split_into_blocks(observed)] == [2, 1, 1]
    assert split_into_blocks([]) == []


def test_block_times_are_medians_of_clean_steps():
    block = Block(
        (
            step(9.0, 25.0, switched=True),
            step(1.0, 90.0, disturbed=True),
            step(),
            step(1.2, 5.2),
            step(7.0, 50.0),
        )
    )
    assert len(block.clean) == 3
    assert block.median_verify_seconds == pytest.approx(5.2e-3)
    assert block.median_draft_seconds == pytest.approx(1.2e-3)
    assert block.switch_step_seconds == [pytest.approx(34e-3)]
    assert block.seconds == pytest.approx(34e-3 + 91e-3 + 6e-3 + 6.4e-3 + 57e-3)
    assert block.drafts == 20 and block.accepted_at == (15, 5)


def test_lost_time_leaves_out_disturbed_steps_and_is_never_negative():
    block = Block((step(), step(1.0, 90.0, disturbed=True)))
    assert block.lost_seconds(baseline=4000.0) == pytest.approx(6e-3 - 8 / 4000)
    assert block.lost_seconds(baseline=1000.0) == 0.0


def test_block_summary_counts_the_steps_that_plain_decoding_would_need():
    summary = Block((step(9.0, 25.0, switched=True), step(), step())).summary()
    assert (summary.steps, summary.running, summary.context) == (2, 4, 300.0)
    assert summary.seconds == pytest.approx(12e-3) and summary.plain_steps == 4.0
    assert summary.drafts == 12 and summary.accepted_at == (9, 3), "acceptance is of all steps"


def test_cost_model_is_updated_by_a_block():
    cost = CostModel(BUCKETS, [1, 3])
    cost.update(Block((step(21.0, 5.0, switched=True), step(), step(), step())))
    assert cost.verify_seconds(4, 3, 300.0) == pytest.approx(5e-3)
    assert cost.draft_seconds("eagle", [2], 4)[0] == pytest.approx(1e-3)
    assert cost.switch_seconds("eagle", 4, 300.0) == pytest.approx(20e-3), "beyond the usual step"
    disturbed = step(0.0, 70.0, decision=Decision(PLAIN), disturbed=True, accepted_at=(), drafts=0)
    cost.update(Block((disturbed,)))
    assert not cost.is_measured(4, 1, 300.0), "somebody else's time is not learnt"
