"""Weights from the learner's process to the worker's: one piece of memory that both have mapped.

The client writes every tensor under its Hugging Face name at a fixed place and sends a message; the worker
reads between two decode steps and answers, and only then does the client write again. The memory is an
unlinked file, so whoever dies, nothing of it stays behind, and a restarted worker finds the newest weights.
"""

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import torch

SHARED_MEMORY = "/dev/shm"
ALIGNMENT = 64


class SharedWeights:
    """The client's end: room for one set of weights."""

    def __init__(self) -> None:
        folder = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - as long as the client lives
        self.layout: list[dict[str, Any]] = []
        self._memory: mmap.mmap | None = None

    def write(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[dict[str, Any]]:
        """Copies weights in and returns where each of them lies."""
        tensors = dict(weights)
        if not self.layout:
            self._lay_out(tensors)
        for entry in self.layout:
            view = _view(self._memory, entry)
            view.copy_(tensors[entry["name"]])
        return self.layout

    def close(self) -> None:
        """Gives the memory back."""
        self.file.close()

    def _lay_out(self, tensors: dict[str, torch.Tensor]) -> None:
        offset = 0
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.layout.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset})
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.file.truncate(max(1, offset))
        self._memory = mmap.mmap(self.file.fileno(), max(1, offset))


class WeightsReader:
    """The worker's end."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory: mmap.mmap | None = None

    def read(self, layout: list[dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields views of the weights; they are valid until the message is answered."""
        if self._memory is None:
            self._memory = mmap.mmap(self.descriptor, 0)
        for entry in layout:
            yield entry["name"], _view(self._memory, entry)


def _view(memory: mmap.mmap | None, entry: dict[str, Any]) -> torch.Tensor:
    assert memory is not None
    shape = entry["shape"]
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=getattr(torch, entry["dtype"]))
    flat = torch.frombuffer(memory, dtype=getattr(torch, entry["dtype"]), count=count, offset=entry["offset"])
    return flat.view(shape)
