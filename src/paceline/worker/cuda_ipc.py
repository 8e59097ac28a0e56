"""Weights between processes on the same machine's GPUs: the reader maps the writer's own memory.

Handles travel once; from then on a transfer is the message that weights have changed, and the reader's copy
at the speed of the GPU's memory. Nothing passes through the host. A tensor that the learner does not keep at
one place is copied to one that stays (a LoRA merge, a gathered shard).
"""

import base64
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from paceline.worker.digest import weights_digest
from paceline.worker.readers import ReadersLock
from paceline.worker.weights import check_digest


class IpcWeights(ReadersLock):
    """The writer's end: its own tensors, opened to other processes."""

    def __init__(self) -> None:
        super().__init__()
        self.descriptor: int | None = None
        self.version: int | None = None
        self.digest = ""
        self._shared: dict[str, torch.Tensor] = {}
        self._handles: dict[int, list[Any]] = {}  # by address of the storage
        self._entries: list[dict[str, Any]] = []

    def write(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Makes weights the newest; those that lie where they lay before are not touched."""
        with self.writing():
            for name, tensor in weights:
                kept = self._shared.get(name)
                if kept is None:
                    self._shared[name] = tensor.detach()
                    self._entries.append(self._entry(name, tensor))
                elif kept.data_ptr() != tensor.data_ptr():
                    kept.copy_(tensor)
            self.digest = weights_digest(self._shared.items())
            torch.cuda.synchronize()  # readers have streams of their own
            self.version = version

    def notices(self, workers: Sequence[str]) -> list[dict[str, Any]]:
        """Returns what each worker must be told: where every tensor lies."""
        storages = {str(address): handle for address, handle in self._handles.items()}
        return [
            {
                "transport": "ipc",
                "version": self.version,
                "digest": self.digest,
                "tensors": list(self._entries),
                "storages": storages,
            }
        ] * len(workers)

    def changed_in_place(self) -> bool:
        """Whether learning has begun to change them: a new worker must wait for the next."""
        return weights_digest(self._shared.items()) != self.digest

    def cancel(self, notice: dict[str, Any]) -> None:
        """Does nothing: readers do not wait for one another."""

    def close(self) -> None:
        """Lets go of the tensors."""
        self._shared.clear()
        self._entries.clear()
        self._handles.clear()

    def _entry(self, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._handles:
            self._handles[storage.data_ptr()] = [_as_text(part) for part in storage._share_cuda_()]
        return {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "offset": tensor.storage_offset(),
            "storage": str(storage.data_ptr()),
        }


class IpcReader:
    """The worker's end: keeps what it has mapped."""

    def __init__(self) -> None:
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._entries: list[dict[str, Any]] = []
        self._weights: list[tuple[str, torch.Tensor]] = []

    def read(self, notice: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """Returns the writer's own tensors, valid until the message is answered; checks their digest."""
        for address, handle in notice["storages"].items():
            if address not in self._storages:
                parts = [_from_text(part) for part in handle]
                torch.cuda._lazy_init()
                self._storages[address] = torch.UntypedStorage._new_shared_cuda(*parts)
        if notice["tensors"] != self._entries:
            self._entries = notice["tensors"]
            self._weights = [(entry["name"], self._tensor(entry)) for entry in self._entries]
        check_digest(weights_digest(self._weights), notice)
        return self._weights

    def _tensor(self, entry: dict[str, Any]) -> torch.Tensor:
        storage = self._storages[entry["storage"]]
        empty = torch.empty(0, dtype=getattr(torch, entry["dtype"]), device=storage.device)
        return empty.set_(storage, entry["offset"], entry["shape"], entry["stride"])


def _as_text(part: Any) -> Any:
    return {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part


def _from_text(part: Any) -> Any:
    return base64.b64decode(part["bytes"]) if isinstance(part, dict) else part
