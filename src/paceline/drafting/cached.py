"""A drafter with keys and values of its own, in a cache under the pool's block numbers: it is copied, lent
out and brought back with the pool.
"""

from paceline.drafting.base import Drafter
from paceline.paged.cache import KVCache


class CachedDrafter(Drafter):
    cache: KVCache  # made by `bind`
    has_probabilities = True

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        self.cache.copy_blocks(sources, targets)

    def sleep(self) -> None:
        self.cache.sleep()

    def wake(self) -> None:
        self.cache.wake()
