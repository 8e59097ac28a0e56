"""Blocks ahead of need: the host knows a bound on the length of running rows, not the length itself.

tokens known |.........|
bound        |.........|....|          every step launched since adds its queries, accepted or not
blocks       |.........|....|.......|  enough for the next RESERVED_STEPS, so the host checks only that often
"""

from collections.abc import Iterable

import numpy as np

from paceline.engine.blocks import BlockPool
from paceline.engine.outcomes import Batch
from paceline.engine.request_state import RequestState
from paceline.engine.rows import Rows
from paceline.paged.cache import BLOCK_SIZE

# Steps that rows have blocks for after each check.
RESERVED_STEPS = 16


class Reservation:
    """Bounds on the length of running rows, and the blocks that they need for those."""

    def __init__(self, rows: Rows, pool: BlockPool, slots: int) -> None:
        self.rows = rows
        self.pool = pool
        # Per slot: a bound on the length that its row may have reached, ...
        self.bound = np.zeros(slots + 1, dtype=np.int64)
        # ... the tokens that its blocks can hold, ...
        self.capacity = np.zeros(slots + 1, dtype=np.int64)
        # ... and the length at which it ends.
        self.limit = np.zeros(slots + 1, dtype=np.int64)
        # Positions per row that may run before blocks are checked again.
        self.left = 0

    def enter(self, sequences: Iterable[RequestState]) -> None:
        """Records length, limit and blocks of rows that begin to run."""
        for sequence in sequences:
            self.bound[sequence.slot] = sequence.length
            self.limit[sequence.slot] = sequence.limit
            self.capacity[sequence.slot] = len(sequence.blocks) * BLOCK_SIZE

    def missing(self, batch: Batch, num_queries: int) -> np.ndarray:
        """Returns the blocks that each row of the batch lacks for RESERVED_STEPS steps of so many queries."""
        wanted = np.minimum(self.bound[batch.slots] + RESERVED_STEPS * num_queries, self.limit[batch.slots])
        return np.maximum(0, -(-(wanted - self.capacity[batch.slots]) // BLOCK_SIZE))

    def hand_out(self, batch: Batch, num_queries: int) -> None:
        slots: list[int] = []
        indices: list[int] = []
        blocks: list[int] = []
        missing_blocks = self.missing(batch, num_queries)
        for i in missing_blocks.nonzero()[0].tolist():
            sequence = batch.sequences[i]
            missing = int(missing_blocks[i])
            new = self.pool.allocate(missing)
            slots += [sequence.slot] * missing
            indices += range(len(sequence.blocks), len(sequence.blocks) + missing)
            blocks += new
            sequence.blocks += new
            self.capacity[sequence.slot] = len(sequence.blocks) * BLOCK_SIZE
        if slots:
            self.rows.extend_blocks(slots, indices, blocks)
        self.left = RESERVED_STEPS * num_queries

    def launched(self, batch: Batch, num_queries: int) -> None:
        """Called after each launch: rows may be longer by its queries."""
        self.left -= num_queries
        self.bound[batch.slots] += num_queries

    def settle(self, batch: Batch, length: np.ndarray) -> None:
        """Called when nothing is in flight: bounds become lengths; `length` is that of every slot."""
        self.bound[batch.slots] = length[batch.slots]
