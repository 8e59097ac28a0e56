"""The requests that wait for a replica: longest first where lengths are known, else first come, first served.

The order decides only when something runs, never what it samples. Siblings stand together, since they expect
the same length, so a replica that takes several of them computes their prompt once. A request that continues
another goes to the replica that holds its cache, as long as that one is there.
"""

from collections import deque
from collections.abc import Collection, Iterable

from paceline.engine.expected_lengths import ExpectedLengths
from paceline.types import Completion, Request


class RequestQueue:
    """Requests that no replica has yet; not locked, its owner is."""

    def __init__(self) -> None:
        self.lengths = ExpectedLengths()
        self._waiting: deque[Request] = deque()
        self._at_home: dict[int, deque[Request]] = {}  # those that one replica should take
        self._homes: dict[str, int] = {}  # of held requests
        self._sorted = True

    def __len__(self) -> int:
        return len(self._waiting) + sum(map(len, self._at_home.values()))

    @property
    def unbound(self) -> int:
        """Requests that any replica may take."""
        return len(self._waiting)

    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            home = self._homes.get(request.continues) if request.continues else None
            if home is None:
                self._waiting.append(request)
                self._sorted = False
            else:
                self._at_home.setdefault(home, deque()).append(request)

    def waits_for(self, replica: int) -> bool:
        """Whether requests are bound to this replica, which it takes whatever its share."""
        return bool(self._at_home.get(replica))

    def take(self, replica: int, share: int) -> list[Request]:
        """Removes and returns the requests bound to this replica, and up to `share` of the others."""
        taken = list(self._at_home.pop(replica, ()))
        if not self._sorted:
            self._waiting = deque(sorted(self._waiting, key=lambda r: -self.lengths.of(r)))
            self._sorted = True
        while self._waiting and len(taken) < share:
            taken.append(self._waiting.popleft())
        return taken

    def remove(self, ids: Collection[str]) -> list[Request]:
        gone = [request for queue in self._queues() for request in queue if request.id in ids]
        self._waiting = deque(request for request in self._waiting if request.id not in ids)
        self._at_home = {
            home: deque(request for request in own if request.id not in ids)
            for home, own in self._at_home.items()
        }
        return gone

    def note(self, completion: Completion, replica: int) -> None:
        """Records a completion: its length, and which replica holds its cache."""
        request = completion.request
        self.lengths.note(request, len(completion.tokens))
        self._homes.pop(request.continues, None)
        if request.hold:
            self._homes[request.id] = replica

    def forget(self, replica: int) -> None:
        """A replica is gone with its caches: requests bound to it may run anywhere."""
        self._homes = {name: home for name, home in self._homes.items() if home != replica}
        self.add(self._at_home.pop(replica, ()))

    def clear(self) -> None:
        self._waiting.clear()
        self._at_home.clear()

    def _queues(self) -> list[deque[Request]]:
        return [self._waiting, *self._at_home.values()]
