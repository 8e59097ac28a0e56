"""The replicas' idle time, and how much of it they trained for."""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Activity:
    """What the replicas of a pool do at one moment."""

    ready: list[bool]  # and able to train
    busy: list[bool]
    waiting: bool  # whether requests wait for a replica
    changes: int  # how often anything has changed until then

    @property
    def generates(self) -> bool:
        """Whether a rollout is under way."""
        return self.waiting or any(self.busy)


class IdleClock:
    """The share of replicas' time in which they were idle while others generated."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._state = (0, 0, False)
        self._idle = self._whole = self._trained = 0.0

    def note(self, replicas: int, busy: int, outstanding: bool) -> None:
        """Records the time since the last call under the previous values; these hold from now on."""
        now = time.monotonic()
        replicas_before, busy_before, worked = self._state
        if worked:
            self._idle += (replicas_before - busy_before) * (now - self._since)
            self._whole += replicas_before * (now - self._since)
        self._since = now
        self._state = (replicas, busy, outstanding)

    def note_trained(self, seconds: float) -> None:
        self._trained += seconds

    def take_shares(self) -> tuple[float, float]:
        """Returns the idle share since the last call, before and after subtracting training."""
        whole = self._whole or 1.0
        shares = self._idle / whole, max(0.0, self._idle - self._trained) / whole
        self._idle = self._whole = self._trained = 0.0
        return shares
