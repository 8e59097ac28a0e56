"""Blocks ahead of need: whatever steps do with their queries, no row ever writes beyond its blocks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.blocks import BlockPool
from paceline.engine.outcomes import Batch
from paceline.engine.request_state import RequestState
from paceline.engine.reservation import RESERVED_STEPS, Reservation
from paceline.engine.rows import MAX_QUERY, NewRow, Rows
from paceline.paged.cache import BLOCK_SIZE, blocks_for
from paceline.types import Request, SamplingParams

SLOTS = 3
MAX_LENGTH = 600


class Bench:
    """Rows on the CPU with a reservation, and the lengths that the device would know."""

    def __init__(self, lengths: list[int], max_tokens: int = 500, num_blocks: int = 200) -> None:
        self.pool = BlockPool(num_blocks)
        self.rows = Rows(SLOTS, MAX_LENGTH, torch.float32, torch.device("cpu"))
        self.reservation = Reservation(self.rows, self.pool, SLOTS)
        self.length = np.zeros(SLOTS + 1, dtype=np.int64)
        sampling = SamplingParams(max_tokens=max_tokens)
        self.sequences = []
        for slot, length in enumerate(lengths):
            request = Request(str(slot), tuple(range(length)), 0, sampling)
            sequence = RequestState(request, slot, length + max_tokens, slot=slot)
            sequence.blocks = self.pool.allocate(blocks_for(length))
            self.sequences.append(sequence)
            self.length[slot] = length
        self.rows.enter(
            [NewRow(s.slot, s.tokens, s.limit, 0, sampling, (), s.blocks) for s in self.sequences]
        )
        self.reservation.enter(self.sequences)
        self.batch = Batch.of(self.sequences, np.zeros(SLOTS + 1, dtype=np.int64))

    def hand_out(self, queries: int) -> None:
        self.reservation.hand_out(self.batch, queries)

    def launch(self, queries: int, accepted: list[int]) -> None:
        """A step writes one position per query and keeps as many tokens as were accepted."""
        self.reservation.launched(self.batch, queries)
        for sequence, count in zip(self.sequences, accepted, strict=True):
            slot = sequence.slot
            if self.length[slot] >= sequence.limit:
                continue
            written = min(int(self.length[slot]) + queries, sequence.limit)
            assert blocks_for(written) <= len(sequence.blocks), "it writes into a block that is not its own"
            self.length[slot] = min(self.length[slot] + count, sequence.limit)

    def check_table(self) -> None:
        """What the device reads are the blocks that the host gave."""
        for sequence in self.sequences:
            row = self.rows.state.block_table[sequence.slot].tolist()
            assert row == sequence.blocks + [0] * (len(row) - len(sequence.blocks))


@settings(deadline=None)
@given(st.data())
def test_reservation_keeps_steps_within_their_blocks(data):
    bench = Bench(data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=SLOTS)))
    for _ in range(data.draw(st.integers(1, 5))):
        queries = data.draw(st.integers(1, MAX_QUERY))
        bench.hand_out(queries)
        bench.check_table()
        while bench.reservation.left >= queries:
            bench.launch(queries, [data.draw(st.integers(1, queries)) for _ in bench.sequences])
            if data.draw(st.booleans()) and data.draw(st.booleans()):
                break  # something else needs looking at before the blocks run out
        if data.draw(st.booleans()):
            bench.reservation.settle(bench.batch, bench.length)


@pytest.mark.parametrize("queries", [1, 5, MAX_QUERY])
def test_reservation_lasts_for_exactly_the_reserved_steps(queries):
    bench = Bench([1, 17])
    bench.hand_out(queries)
    for _ in range(RESERVED_STEPS):
        assert bench.reservation.left >= queries
        bench.launch(queries, [queries, queries])
    assert bench.reservation.left == 0


def test_reservation_misses_nothing_after_a_hand_out():
    bench = Bench([5, 30])
    assert bench.reservation.missing(bench.batch, 4).tolist() == [
        blocks_for(5 + RESERVED_STEPS * 4) - blocks_for(5),
        blocks_for(30 + RESERVED_STEPS * 4) - blocks_for(30),
    ]
    bench.hand_out(4)
    assert bench.reservation.missing(bench.batch, 4).tolist() == [0, 0]


def test_reservation_gives_no_row_more_blocks_than_it_can_fill():
    bench = Bench([10], max_tokens=3)
    bench.hand_out(MAX_QUERY)
    assert len(bench.sequences[0].blocks) == 1 and bench.pool.used == 1


def test_reservation_settle_drops_rejected_tokens_from_the_bound():
    """Bounds count every query; the lengths that come back count what was accepted."""
    bench = Bench([1])
    bench.hand_out(8)
    for _ in range(RESERVED_STEPS):
        bench.launch(8, [1])
    assert bench.reservation.missing(bench.batch, 8).sum() == 8 * RESERVED_STEPS // BLOCK_SIZE
    bench.reservation.settle(bench.batch, bench.length)
    assert bench.reservation.missing(bench.batch, 8).sum() == 1


def test_reservation_asserts_that_the_pool_has_the_blocks():
    bench = Bench([1], num_blocks=3)
    with pytest.raises(AssertionError, match="asked for"):
        bench.hand_out(MAX_QUERY)
