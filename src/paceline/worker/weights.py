"""Weights from the learner's process to workers on its machine: one piece of memory that all have mapped.

The writer puts every tensor under its Hugging Face name at a fixed place and tells the workers; each reads
between two decode steps, compares the digest and answers, and weights are written again only when there are
no readers. The memory is an unlinked file, so it is freed whichever process dies, and a restarted worker
finds the newest weights.
"""

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from paceline.worker.digest import weights_digest
from paceline.worker.readers import ReadersLock, WeightsDamaged

SHARED_MEMORY = "/dev/shm"
ALIGNMENT = 64


class SharedWeights(ReadersLock):
    """The writer's end: room for one set of weights."""

    def __init__(self) -> None:
        super().__init__()
        folder = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - as long as the client lives
        self.descriptor: int | None = self.file.fileno()
        self.layout: list[dict[str, Any]] = []
        self.version: int | None = None
        self.digest = ""
        self._memory: mmap.mmap | None = None

    def write(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies weights in; waits while the previous ones are being read."""
        # One tensor at a time: ranks gather them, and none is good for longer.
        with self.writing():
            if not self.layout:
                self._write_first(weights)
            else:
                places = {entry["name"]: entry for entry in self.layout}
                for name, tensor in weights:
                    _view(self._memory, places[name]).copy_(tensor)
            self.digest = weights_digest(self._tensors())
            self.version = version

    def notices(self, workers: Sequence[str]) -> list[dict[str, Any]]:
        path = f"/proc/{os.getpid()}/fd/{self.file.fileno()}"
        notice = {"version": self.version, "layout": self.layout, "digest": self.digest, "path": path}
        return [{"transport": "memory"} | notice] * len(workers)

    def cancel(self, notice: dict[str, Any]) -> None:
        """No-op: readers do not wait for one another."""

    def close(self) -> None:
        self.file.close()

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for entry in self.layout:
            yield entry["name"], _view(self._memory, entry)

    def _write_first(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Writes weights one behind the other, which fixes the place of each for good."""
        offset = 0
        for name, tensor in weights:
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.layout.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset})
            self.file.seek(offset)
            self.file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.file.truncate(max(1, offset))
        self.file.flush()
        self._memory = mmap.mmap(self.file.fileno(), max(1, offset))


class WeightsReader:
    """The worker's end; without a descriptor that it inherited, the notice says where the memory lies."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = descriptor
        self._memory: mmap.mmap | None = None
        self._path = ""

    def read(self, notice: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """Returns views of the weights, valid until the message is answered; checks their digest."""
        self._map(notice["path"])
        weights = [(entry["name"], _view(self._memory, entry)) for entry in notice["layout"]]
        check_digest(weights_digest(weights), notice)
        return weights

    def _map(self, path: str) -> None:
        if self._memory is not None and (self.descriptor is not None or path == self._path):
            return
        if self.descriptor is not None:
            self._memory = mmap.mmap(self.descriptor, 0)
            return
        with open(path, "r+b") as file:  # noqa: PTH123 - a descriptor of another process
            self._memory = mmap.mmap(file.fileno(), 0)
        self._path = path


def check_digest(found: str, notice: dict[str, Any]) -> None:
    if found != notice["digest"]:
        raise WeightsDamaged(
            f"weights of version {notice['version']} arrived with digest {found}, "
            f"they were sent with {notice['digest']}"
        )


def _view(memory: mmap.mmap | None, entry: dict[str, Any]) -> torch.Tensor:
    assert memory is not None
    shape = entry["shape"]
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=getattr(torch, entry["dtype"]))
    flat = torch.frombuffer(memory, dtype=getattr(torch, entry["dtype"]), count=count, offset=entry["offset"])
    return flat.view(shape)
