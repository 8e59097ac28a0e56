"""Weights between processes on the same machine's GPUs: the reader maps the writer's own memory.

A transfer is the message that weights have changed, and the reader's copy at the speed of the GPU's memory.
Nothing passes through the host. A tensor that the learner does not keep at one place is copied to one that
stays (a LoRA merge, a gathered shard).

Every message says where all tensors lie, so that it does not matter who has read which before. That is one
text, written once, and read by a worker that has not just seen the same: hundreds of tensors would take
longer to write down than to copy.
"""

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.worker.digest import WeightsDigest
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
        self._handles: dict[str, list[Any]] = {}  # by address of the storage
        self._entries: list[dict[str, Any]] = []
        self._layout = ""  # entries and handles, as a notice carries them; empty: not yet
        self._digest = WeightsDigest()

    def write(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publishes weights; tensors at unchanged addresses are not copied."""
        with self.writing():
            for name, tensor in weights:
                kept = self._shared.get(name)
                if kept is None:
                    self._shared[name] = tensor.detach()
                    self._entries.append(self._entry(name, tensor))
                    self._layout = ""
                elif kept.data_ptr() != tensor.data_ptr():
                    kept.copy_(tensor)
            if not self._layout:
                self._layout = _packed({"tensors": self._entries, "storages": self._handles})
            self.digest = self._digest.of(self._shared.items())
            torch.cuda.synchronize()  # readers have streams of their own
            self.version = version

    def notices(self, workers: Sequence[str]) -> list[dict[str, Any]]:
        notice = {"version": self.version, "digest": self.digest, "layout": self._layout}
        return [{"transport": "ipc"} | notice] * len(workers)

    def changed_in_place(self) -> bool:
        """Whether the learner has begun to change them: a new worker must wait for the next update."""
        return self._digest.of(self._shared.items()) != self.digest

    def cancel(self, notice: dict[str, Any]) -> None:
        """No-op: readers do not wait for one another."""

    def close(self) -> None:
        self._shared.clear()
        self._entries.clear()
        self._handles.clear()
        self._digest = WeightsDigest()

    def _entry(self, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        storage = tensor.untyped_storage()
        address = str(storage.data_ptr())
        if address not in self._handles:
            self._handles[address] = [_as_text(part) for part in storage._share_cuda_()]
        return {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "offset": tensor.storage_offset(),
            "storage": address,
        }


class IpcReader:
    """The worker's end: keeps what it has mapped."""

    def __init__(self) -> None:
        self._layout = ""
        self._storages: dict[str, _Mapped] = {}  # by the writer's address
        self._weights: list[tuple[str, torch.Tensor]] = []
        self._digest = WeightsDigest()

    def read(self, notice: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """Returns the writer's own tensors, valid until the message is answered; checks their digest."""
        if notice["layout"] != self._layout:
            self._map(_unpacked(notice["layout"]))
            self._layout = notice["layout"]
        check_digest(self._digest.of(self._weights), notice)
        return self._weights

    def _map(self, layout: dict[str, Any]) -> None:
        """Maps new storages and releases those that the writer no longer names."""
        storages = {}
        for address, handle in layout["storages"].items():
            mapped = self._storages.get(address)
            # Another writer may have something else at the same address.
            storages[address] = mapped if mapped and mapped.handle == handle else _Mapped.open(handle)
        self._storages = storages
        self._weights = [(entry["name"], self._tensor(entry)) for entry in layout["tensors"]]

    def _tensor(self, entry: dict[str, Any]) -> torch.Tensor:
        storage = self._storages[entry["storage"]].storage
        empty = torch.empty(0, dtype=getattr(torch, entry["dtype"]), device=storage.device)
        return empty.set_(storage, entry["offset"], entry["shape"], entry["stride"])


@dataclass(frozen=True)
class _Mapped:
    """The writer's memory as this process sees it."""

    handle: list[Any]
    storage: torch.UntypedStorage

    @staticmethod
    def open(handle: list[Any]) -> "_Mapped":
        torch.cuda._lazy_init()
        return _Mapped(handle, torch.UntypedStorage._new_shared_cuda(*map(_from_text, handle)))


def _packed(layout: dict[str, Any]) -> str:
    """Encodes a layout without characters that JSON would have to escape."""
    return base64.b64encode(zlib.compress(json.dumps(layout).encode())).decode()


def _unpacked(text: str) -> dict[str, Any]:
    return json.loads(zlib.decompress(base64.b64decode(text)))


def _as_text(part: Any) -> Any:
    return {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part


def _from_text(part: Any) -> Any:
    return base64.b64decode(part["bytes"]) if isinstance(part, dict) else part
