"""Drafters with keys and values of their own, in a cache under the pool's block numbers.

The cache is copied, released and allocated again together with the pool.
"""

from paceline.drafting.base import Drafter
from paceline.paged.cache import KVCache


class CachedDrafter(Drafter):
    """A drafter whose layers have a KV cache, which `bind` makes."""

    cache: KVCache
    has_probabilities = True

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        self.cache.copy_blocks(sources, targets)

    def sleep(self) -> None:
        self.cache.sleep()

    def wake(self) -> None:
        self.cache.wake()
