"""How much of their time replicas had nothing to do."""

import time


class IdleClock:
    """The share of replicas' time in which they had nothing to do while others had."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._state = (0, 0, False)
        self._idle = self._whole = 0.0

    def note(self, replicas: int, busy: int, outstanding: bool) -> None:
        """Takes in what has held since the last call, and what holds from now on."""
        now = time.monotonic()
        replicas_before, busy_before, worked = self._state
        if worked:
            self._idle += (replicas_before - busy_before) * (now - self._since)
            self._whole += replicas_before * (now - self._since)
        self._since = now
        self._state = (replicas, busy, outstanding)

    def take_idle_share(self) -> float:
        """Returns the share since the last call."""
        share = self._idle / self._whole if self._whole else 0.0
        self._idle = self._whole = 0.0
        return share
