"""Weights that others read while their owner wants to write the next: the lock and the interface."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class WeightsDamaged(RuntimeError):
    """The weights received are not those that were sent."""


class TransferInterrupted(RuntimeError):
    """A transfer of weights did not complete; the previous weights are still in place."""


class Weights(Protocol):
    """Where workers get weights from, as their clients see it (memory, CUDA IPC, a broadcast)."""

    version: int | None  # of the newest; None: there are none yet
    descriptor: int | None  # of memory that a process started here inherits

    def write(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publishes weights; waits while the previous ones are being read."""

    def notices(self, workers: Sequence[str]) -> list[dict[str, Any]]:
        """Begins a transfer to these workers, whose names are distinct; returns a notice for each."""

    def changed_in_place(self) -> bool:
        """Whether the newest weights are gone because their owner updates them in place."""

    def cancel(self, notice: dict[str, Any]) -> None:
        """Aborts the transfer of a notice: one of its workers is gone."""

    def begin_reading(self) -> None:
        """Keeps the newest weights as they are until `end_reading`."""

    def end_reading(self) -> None:
        """Ends what `begin_reading` began."""

    def close(self) -> None:
        """Releases all memory and connections."""


class ReadersLock:
    """Many may read, or one may write."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0

    def changed_in_place(self) -> bool:
        """False: the weights have memory of their own."""
        return False

    def begin_reading(self) -> None:
        with self._changed:
            self._readers += 1

    def end_reading(self) -> None:
        with self._changed:
            self._readers -= 1
            self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Waits until there are no readers, and admits none within the context."""
        with self._changed:
            self._changed.wait_for(lambda: not self._readers)
            yield
