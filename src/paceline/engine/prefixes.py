"""Which blocks of the KV cache hold which prefix, for prompts that begin as earlier texts did.

A block is known by its parent and its own tokens, exactly: no hash stands for them.

    scope ──▶ tokens 0-15 ──▶ tokens 16-31 ──▶ tokens 32-47
                         └──▶ other tokens 16-31

A scope is a separate tree. A block whose parent is gone is not found again.
"""

from collections.abc import Sequence
from itertools import count

from paceline.paged.cache import BLOCK_SIZE

# A scope or the number of the parent's entry, and the block's tokens.
Key = tuple[str | int, tuple[int, ...]]


class PrefixIndex:
    """Finds whole blocks by the tokens that they hold, from the beginning of a sequence."""

    def __init__(self) -> None:
        self._numbers = count()
        self._entries: dict[Key, tuple[int, int]] = {}  # a block, and the number of this entry
        self._keys: dict[int, Key] = {}  # by block

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def find(self, scope: str, tokens: Sequence[int]) -> list[int]:
        """Returns the blocks of the longest known prefix of `tokens`, in whole blocks."""
        blocks = []
        parent: str | int = scope
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            entry = self._entries.get((parent, tuple(tokens[start : start + BLOCK_SIZE])))
            if entry is None:
                break
            blocks.append(entry[0])
            parent = entry[1]
        return blocks

    def add(self, scope: str, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Records what whole blocks hold: the first of `blocks` the first tokens, and so on."""
        parent: str | int = scope
        for number, start in enumerate(range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE)):
            key = (parent, tuple(tokens[start : start + BLOCK_SIZE]))
            entry = self._entries.get(key)
            if entry is None:
                entry = (blocks[number], next(self._numbers))
                self.drop(blocks[number])
                self._entries[key] = entry
                self._keys[blocks[number]] = key
            parent = entry[1]

    def drop(self, block: int) -> None:
        """Forgets a block, because it will hold something else; no-op if it is not known."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._entries[key]

    def clear(self) -> None:
        self._entries.clear()
        self._keys.clear()
