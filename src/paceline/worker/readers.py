"""Weights that others read while their owner wants to write the next: the lock, and what a client needs."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class WeightsDamaged(RuntimeError):
    """What arrived is not what was sent."""


class TransferInterrupted(RuntimeError):
    """A transfer of weights did not come to its end; the weights from before are still in place."""


class Weights(Protocol):
    """Where workers get weights from, as their clients see it (memory, CUDA IPC, a broadcast)."""

    version: int | None  # of the newest; None: there are none yet
    descriptor: int | None  # of memory that a process started here inherits

    def write(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Makes weights the newest; waits while somebody reads the ones before."""

    def notices(self, workers: Sequence[str]) -> list[dict[str, Any]]:
        """Begins a transfer to these workers, of which no two are called alike; returns what to tell each."""

    def changed_in_place(self) -> bool:
        """Whether the newest weights are no longer there, because their owner learns where they lie."""

    def cancel(self, notice: dict[str, Any]) -> None:
        """Gives up the transfer that a notice is of: one of its workers is gone."""

    def begin_reading(self) -> None:
        """Keeps the newest weights as they are until `end_reading`."""

    def end_reading(self) -> None:
        """Ends what `begin_reading` began."""

    def close(self) -> None:
        """Gives everything back."""


class ReadersLock:
    """Many may read, or one may write."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0

    def changed_in_place(self) -> bool:
        """Returns False: they lie in memory of their own."""
        return False

    def begin_reading(self) -> None:
        """Keeps the newest weights as they are until `end_reading`."""
        with self._changed:
            self._readers += 1

    def end_reading(self) -> None:
        """Ends what `begin_reading` began."""
        with self._changed:
            self._readers -= 1
            self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Waits until nobody reads, and lets nobody begin."""
        with self._changed:
            self._changed.wait_for(lambda: not self._readers)
            yield
