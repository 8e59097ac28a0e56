"""When a drafter that failed may be tried again, and where."""

import random

import pytest

from paceline.pacing.drafter_record import DrafterRecord
from paceline.pacing.settings import DEFAULT_TUNING
from paceline.pacing.situation import Situation, is_new_rollout, situation_of
from paceline.pacing.strategy import Moment

FULL = situation_of(200, 300)
TAIL = situation_of(2, 3000)


def make_record() -> DrafterRecord:
    return DrafterRecord(3, random.Random(0))


def test_situations_are_classes_of_batch_and_context():
    batches = {1: 0, 2: 1, 4: 1, 5: 2, 16: 2, 17: 3, 64: 3, 65: 4, 256: 4}
    assert {rows: situation_of(rows, 0).batch_class for rows in batches} == batches
    assert [situation_of(1, n).context_class for n in (0, 511, 512, 1024, 5000)] == [0, 0, 1, 2, 4]
    assert FULL == situation_of(129, 400) == Situation(batch_class=4, context_class=0) != TAIL


@pytest.mark.parametrize(
    "before, now, expected",
    [
        (None, Moment(8, 100.0), False),
        (Moment(8, 100.0), Moment(7, 120.0), False),
        (Moment(8, 100.0), Moment(15, 100.0), False),
        (Moment(8, 100.0), Moment(16, 100.0), True),
        (Moment(8, 100.0), Moment(8, 50.0), True),
    ],
)
def test_new_rollout_is_detected_by_twice_the_batch_or_half_the_context(before, now, expected):
    assert is_new_rollout(before, now, DEFAULT_TUNING.new_rollout_factor) is expected


def test_suspensions_and_waits_are_of_one_situation():
    record = make_record()
    assert record.is_due(FULL, 0)
    record.acceptance.update(FULL, 64, (0, 0, 0), 1)
    for step in range(0, 40000, 4000):
        record.suspend(FULL, step)
    assert record.is_suspended(FULL, 36000 + 3000) and not record.is_suspended(TAIL, 36000)
    assert record.is_due(TAIL, 36000), "nothing is known of it there"
    record.acceptance.update(TAIL, 64, (0, 0, 0), 1)
    assert not record.is_due(TAIL, 36001), "once something is known, it waits there, too"
    assert record.is_due(TAIL, 36000 + 700), "but not as long"
    record.reset_backoff(FULL, 40000)
    record.suspend(FULL, 41000)
    assert record.is_suspended(FULL, 41040) and not record.is_suspended(FULL, 41100), (
        "the wait began anew while it did well"
    )


def test_backoff_waits_double_up_to_a_limit():
    record = make_record()
    record.acceptance.update(FULL, 64, (0, 0, 0), 1)
    waits = []
    for _ in range(9):
        record.back_off(FULL, 0)
        waits.append(next(step for step in range(10000) if record.is_due(FULL, step)))
    for wait, mean in zip(waits, (64, 128, 256, 512, 1024, 2048, 4096, 4096, 4096), strict=True):
        assert 0.75 * mean - 1 <= wait <= 1.25 * mean, waits
    assert not record.is_suspended(FULL, 0), "a failed trial suspends no drafter"


def test_new_rollout_ends_waits_but_no_suspension():
    record = make_record()
    record.acceptance.update(FULL, 64, (0, 0, 0), 1)
    record.acceptance.update(TAIL, 64, (0, 0, 0), 1)
    record.back_off(TAIL, 0)
    record.suspend(FULL, 0)
    assert not record.is_due(TAIL, 1)
    record.begin_rollout()
    assert record.is_due(TAIL, 1) and not record.is_due(FULL, 1) and record.is_suspended(FULL, 1)


def test_drafter_record_queries_change_nothing():
    record = make_record()
    before = (dict(record._by_situation), record.acceptance.state())
    assert record.is_due(TAIL, 5) and not record.is_suspended(TAIL, 5)
    assert (dict(record._by_situation), record.acceptance.state()) == before
