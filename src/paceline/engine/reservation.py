"""Blocks ahead of need: the host knows how long running rows may have become, not how long they are.

tokens known |.........|
bound        |.........|....|         every step launched since adds its queries, whether they were accepted or not
blocks       |.........|....|.......|  enough for the next RESERVED_STEPS, so the host looks at rows this rarely
"""

from collections.abc import Iterable

import numpy as np

from paceline.engine.blocks import BlockPool
from paceline.engine.outcomes import Batch
from paceline.engine.rows import Rows
from paceline.engine.sequence import Sequence
from paceline.paged.cache import BLOCK_SIZE

RESERVED_STEPS = 16


class Reservation:
    def __init__(self, rows: Rows, pool: BlockPool, slots: int) -> None:
        self.rows, self.pool = rows, pool
        # Per slot: a bound on the length its row may have reached, the tokens its blocks can hold, and the
        # length at which it ends.
        self.bound, self.capacity, self.limit = np.zeros((3, slots + 1), dtype=np.int64)
        self.left = 0  # positions per row that may run before blocks are looked at again

    def enter(self, sequences: Iterable[Sequence]) -> None:
        for s in sequences:
            self.bound[s.slot], self.limit[s.slot], self.capacity[s.slot] = (
                s.length,
                s.limit,
                len(s.blocks) * BLOCK_SIZE,
            )

    def missing(self, batch: Batch, queries: int) -> np.ndarray:
        """Blocks that each row of the batch lacks for RESERVED_STEPS steps of so many queries."""
        wanted = np.minimum(self.bound[batch.slots] + RESERVED_STEPS * queries, self.limit[batch.slots])
        return np.maximum(0, -(-(wanted - self.capacity[batch.slots]) // BLOCK_SIZE))

    def hand_out(self, batch: Batch, queries: int) -> None:
        """What is missing; the pool must have it."""
        slots, indices, blocks = [], [], []
        missing_blocks = self.missing(batch, queries)
        for i in missing_blocks.nonzero()[0].tolist():
            sequence, missing = batch.sequences[i], int(missing_blocks[i])
            new = self.pool.allocate(missing)
            slots += [sequence.slot] * missing
            indices += range(len(sequence.blocks), len(sequence.blocks) + missing)
            blocks += new
            sequence.blocks += new
            self.capacity[sequence.slot] = len(sequence.blocks) * BLOCK_SIZE
        if slots:
            self.rows.extend_blocks(slots, indices, blocks)
        self.left = RESERVED_STEPS * queries

    def launched(self, batch: Batch, queries: int) -> None:
        self.left -= queries
        self.bound[batch.slots] += queries

    def settle(self, batch: Batch, length: np.ndarray) -> None:
        """Nothing is in flight: the bounds are lengths (of every slot)."""
        self.bound[batch.slots] = length[batch.slots]
