"""The worker's end of every transport of weights; the notice says which one it is."""

from typing import Any, Protocol

import torch

from paceline.worker.weights import WeightsReader


class Reader(Protocol):
    """One transport's end."""

    def read(self, notice: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """Returns the weights of a notice, checked, valid until the message is answered."""


class WeightsReceiver:
    """Reads weights over any transport, which is imported at its first notice."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._readers: dict[str, Reader] = {"memory": WeightsReader(descriptor)}

    def read(self, notice: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        transport = notice["transport"]
        if transport not in self._readers:
            self._readers[transport] = _make(transport)
        return self._readers[transport].read(notice)


def _make(transport: str) -> Reader:
    if transport == "ipc":
        from paceline.worker.cuda_ipc import IpcReader

        return IpcReader()
    if transport == "broadcast":
        from paceline.worker.broadcast import BroadcastReader

        return BroadcastReader(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    raise ValueError(f"a worker of this version knows no transport {transport!r}")
