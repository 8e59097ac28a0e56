"""The blocks of the KV cache: a free list with reference counts, because siblings share prompt blocks.

Block 0 is never allocated: unused entries of a block table point at it.
"""

# The block that is never handed out.
NULL_BLOCK = 0


class BlockPool:
    """Counts the references to each block, whatever the blocks hold."""

    def __init__(self, num_blocks: int) -> None:
        self._start(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Resets the pool to another number of blocks; none may be in use."""
        assert self.used == 0, f"{self.used} blocks are in use"
        self._start(num_blocks)

    def _start(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._references = [0] * num_blocks

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes free blocks and returns them, each with one reference."""
        assert count <= len(self._free), f"asked for {count} blocks, {len(self._free)} are free"
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> list[int]:
        """Adds a reference to each block and returns a list of them."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free"
            self._references[block] += 1
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        """Drops one reference to each block; blocks without references become free."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
