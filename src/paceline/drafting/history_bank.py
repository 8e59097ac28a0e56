"""Which finished responses the history drafter's bank holds: a ring of text, the oldest overwritten.

    bank_T   | entry 7 | -1 | entry 8 | -1 |  free or older ...  | entry 5 | -1 | entry 6 | -1 | too short |
                                             ▲ head: where entry 9 goes

Entries lie in one piece, so short responses take little; one that does not fit before the end of the ring
goes to its beginning.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A finished response in the bank."""

    # Counts entries in order of arrival.
    number: int
    # Its first token's position in the bank.
    start: int
    # Its tokens; the bank has one more, the mark at its end.
    length: int
    # Leading tokens that are the prompt's last ones.
    context: int
    # The prompt's hash.
    prompt: int


class Ring:
    """Where entries lie in a bank of `size` tokens; it knows nothing of the text."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Oldest first.
        self.entries: deque[Entry] = deque()
        self.head = 0
        self.next_number = 1

    @property
    def oldest(self) -> int:
        """The number of the oldest entry that is still there."""
        return self.entries[0].number if self.entries else self.next_number

    def claim(self, length: int, context: int, prompt: int) -> Entry | None:
        """Makes space for an entry, dropping the oldest; None if it is longer than the ring."""
        if length >= self.size:
            return None
        if self.head + length >= self.size:
            self._drop(self.head, self.size)
            self.head = 0
        self._drop(self.head, self.head + length + 1)
        entry = Entry(self.next_number, self.head, length, context, prompt)
        self.entries.append(entry)
        self.head += length + 1
        self.next_number += 1
        return entry

    def _drop(self, start: int, stop: int) -> None:
        """Drops the oldest entries, which are those that start within `[start, stop)`."""
        while self.entries and start <= self.entries[0].start < stop:
            self.entries.popleft()
