"""Which finished responses the history drafter's bank holds: a ring of text, the oldest overwritten.

    bank_T   | entry 7 | -1 | entry 8 | -1 |  free or older ...  | entry 5 | -1 | entry 6 | -1 | too short a rest |
                                             ▲ head: where entry 9 goes

Entries lie in one piece, so short responses take little; one that does not fit before the end of the ring
goes to its beginning.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    number: int  # in order of arrival
    start: int
    length: int  # and one more for the mark at its end
    context: int  # leading tokens that are the prompt's last
    prompt: int  # its hash


class Ring:
    def __init__(self, size: int) -> None:
        self.size = size
        self.entries: deque[Entry] = deque()  # oldest first
        self.head = 0
        self.next_number = 1

    @property
    def oldest(self) -> int:
        return self.entries[0].number if self.entries else self.next_number

    def claim(self, length: int, context: int, prompt: int) -> Entry | None:
        """Room for an entry, at the expense of the oldest; None if it is longer than the ring."""
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
        """Whoever lies there; in a ring that can only be the oldest."""
        while self.entries and start <= self.entries[0].start < stop:
            self.entries.popleft()
