"""The block pool against a model of who holds what: nothing leaks, nothing is handed out twice."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.engine.blocks import NULL_BLOCK, BlockPool

NUM_BLOCKS = 9


class PoolMachine(RuleBasedStateMachine):
    """Owners allocate, share and release in any order; the model is who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.owners: list[list[int]] = []

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        held = {block for blocks in self.owners for block in blocks}
        if count > self.pool.free:
            with pytest.raises(AssertionError, match="are free"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count and not held & set(blocks) and NULL_BLOCK not in blocks
        self.owners.append(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.owners))
        prefix = blocks[: data.draw(st.integers(0, len(blocks)))]
        shared = self.pool.share(prefix)
        assert shared == prefix and shared is not prefix
        self.owners.append(shared)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1))))

    @rule(num_blocks=st.integers(2, NUM_BLOCKS))
    def resize(self, num_blocks: int) -> None:
        if any(self.owners):
            with pytest.raises(AssertionError, match="blocks are in use"):
                self.pool.resize(num_blocks)
            return
        self.pool.resize(num_blocks)
        assert self.pool.num_blocks == num_blocks and self.pool.free == num_blocks - 1

    @invariant()
    def used_is_what_owners_hold(self) -> None:
        held = {block for blocks in self.owners for block in blocks}
        assert self.pool.used == len(held)
        assert self.pool.free == self.pool.num_blocks - 1 - len(held)
        assert all(NULL_BLOCK < block < self.pool.num_blocks for block in held)


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=40, deadline=None)


def test_block_pool_frees_a_shared_block_after_its_last_owner():
    pool = BlockPool(4)
    prompt = pool.allocate(2)
    first, second = pool.share(prompt), pool.share(prompt)
    pool.release(prompt)
    pool.release(second)
    assert pool.used == 2
    pool.release(first)
    assert pool.used == 0


def test_block_pool_asserts_on_misuse():
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="is free"):
        pool.share(blocks)
    with pytest.raises(AssertionError):
        pool.release([NULL_BLOCK])
