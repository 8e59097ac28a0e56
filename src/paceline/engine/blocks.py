"""The blocks of the KV cache: a free list with reference counts, because siblings share prompt blocks.

Blocks that nobody refers to but that hold a known prefix (`prefixes.py`) are free as well: they are handed
out when no others are left, those that have been unused for longest first.

Block 0 is never allocated: unused entries of a block table point at it.
"""

from collections import OrderedDict
from collections.abc import Sequence

from paceline.engine.prefixes import PrefixIndex

# The block that is never handed out.
NULL_BLOCK = 0


class BlockPool:
    """Counts the references to each block."""

    def __init__(self, num_blocks: int) -> None:
        self.prefixes = PrefixIndex()
        self._start(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Resets the pool to another number of blocks; none may be in use."""
        assert self.used == 0, f"{self.used} blocks are in use"
        self._start(num_blocks)

    def _start(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._references = [0] * num_blocks
        # Free blocks that hold a known prefix, the one unused for longest first.
        self._known: OrderedDict[int, None] = OrderedDict()
        self.prefixes.clear()

    @property
    def free(self) -> int:
        return len(self._free) + len(self._known)

    @property
    def used(self) -> int:
        return self.num_blocks - 1 - self.free

    def allocate(self, count: int) -> list[int]:
        """Takes free blocks and returns them, each with one reference."""
        assert count <= self.free, f"asked for {count} blocks, {self.free} are free"
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._known.popitem(last=False)
        self.prefixes.drop(block)
        return block

    def share(self, blocks: list[int]) -> list[int]:
        """Adds a reference to each block and returns a list of them."""
        for block in blocks:
            assert self._references[block] > 0 or block in self._known, f"block {block} is free"
            self._known.pop(block, None)
            self._references[block] += 1
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        """Drops one reference to each block; blocks without references become free."""
        # A prefix is of use without its end, but not without its beginning: that is handed out last.
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if self._references[block] == 0 and block in self.prefixes:
                self._known[block] = None
        self._free += [b for b in blocks if not self._references[b] and b not in self._known]

    def share_prefix(self, scope: str, tokens: Sequence[int]) -> list[int]:
        """Adds a reference to each block of the longest known prefix, and returns them."""
        return self.share(self.prefixes.find(scope, tokens))

    def forget_prefixes(self) -> None:
        """Called when what the blocks hold is no longer what their tokens would give."""
        self.prefixes.clear()
        self._free += self._known
        self._known.clear()
