"""Weights to workers on any machine: one broadcast to all of them, NCCL between GPUs and gloo between CPUs.

    source    pack bucket 0 ─▶ broadcast ┐ pack bucket 1 ─▶ broadcast ┐ ...  then the digest
    workers              receive bucket 0 ┘ unpack   receive bucket 1 ┘ ...  compare, answer

Two buckets take turns, so that packing one overlaps with sending the other. All tensors are one stream of
bytes, cut wherever a bucket is full. A group is kept as long as its members are the same; where one of them
is gone, the transfer is aborted, workers keep their previous weights, and a new group is made.
"""

import itertools
import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.worker.digest import weights_digest
from paceline.worker.readers import ReadersLock, TransferInterrupted
from paceline.worker.weights import check_digest

BUCKET_BYTES = 64 * 2**20
POLL_SECONDS = 0.005
TIMEOUT_SECONDS = 120.0


class Channel:
    """One group of a source, which is rank 0, and its workers."""

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        cancelled: threading.Event | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Waits for all members; raises `TransferInterrupted` where the source gives up."""
        self.name = name
        self.device = device
        self.bucket_bytes = bucket_bytes
        self.is_source = rank == 0
        own = dist.PrefixStore(name, store)
        own.set(f"joined/{rank}", "1")
        if self.is_source:
            _gather(own, size, cancelled)
        elif _answer(own) != b"go":
            raise TransferInterrupted(f"the source gave up group {name}")
        wait = timedelta(seconds=TIMEOUT_SECONDS)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = wait
            self.group: Any = dist.ProcessGroupNCCL(own, rank, size, options)
        else:
            self.group = dist.ProcessGroupGloo(own, rank, size, wait)

    def send(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Sends names, types and shapes, then the bytes of all tensors."""
        layout = [[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in weights]
        self._send_text(json.dumps(layout))
        buckets = itertools.cycle([self._bucket(), self._bucket()])
        under_way: list[Any] = [None, None]
        for number, filled in enumerate(_fill(weights, buckets, under_way)):
            under_way[number % 2] = self._broadcast(filled)
        for work in under_way:
            _finish(work)

    def receive(self) -> list[tuple[str, torch.Tensor]]:
        layout = json.loads(self._receive_text())
        weights = [
            (name, torch.empty(shape, dtype=getattr(torch, dtype), device=self.device))
            for name, dtype, shape in layout
        ]
        left = sum(tensor.nbytes for _, tensor in weights)
        buckets = itertools.cycle([self._bucket(), self._bucket()])
        target = _Scatter(weights)
        waiting: tuple[Any, torch.Tensor] | None = None
        while left or waiting:
            following = None
            if left:
                bucket = next(buckets)[: min(left, self.bucket_bytes)]
                left -= len(bucket)
                following = (self._broadcast(bucket), bucket)
            if waiting is not None:
                _finish(waiting[0])
                target.take(waiting[1])
            waiting = following
        return weights

    def close(self) -> None:
        """Closes the connections; a member that waits in this group gets an error."""
        if self.device.type == "cuda":
            self.group.abort()
        self.group = None

    def _bucket(self) -> torch.Tensor:
        return torch.empty(self.bucket_bytes, dtype=torch.uint8, device=self.device)

    def _broadcast(self, tensor: torch.Tensor) -> Any:
        try:
            return self.group.broadcast([tensor], _from_source())
        except RuntimeError as error:
            raise TransferInterrupted(str(error)) from None

    def _send_text(self, text: str) -> None:
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(self.device)
        _finish(self._broadcast(torch.tensor([len(data)], device=self.device)))
        _finish(self._broadcast(data))

    def _receive_text(self) -> str:
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        _finish(self._broadcast(size))
        data = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        _finish(self._broadcast(data))
        return bytes(data.tolist()).decode()


class BroadcastWeights(ReadersLock):
    """The source's end."""

    def __init__(self, host: str, device: torch.device, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__()
        self.descriptor: int | None = None
        self.version: int | None = None
        self.digest = ""
        self.host = host
        self.device = device
        self.bucket_bytes = bucket_bytes
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._weights: list[tuple[str, torch.Tensor]] = []
        self._numbers = itertools.count()
        self._sending: dict[int, tuple[threading.Thread, threading.Event]] = {}  # by number of the transfer
        self._one_at_a_time = threading.Lock()
        self._kept: dict[tuple[str, ...], Channel] = {}  # at most one, by its workers

    def write(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Keeps weights as the newest; they must not change while a worker reads them."""
        with self.writing():
            self._weights = [(name, tensor.detach()) for name, tensor in weights]
            self.digest = weights_digest(self._weights)
            self.version = version

    def notices(self, workers: Sequence[str]) -> list[dict[str, Any]]:
        """Starts sending to these workers and returns the notice for each."""
        members = tuple(workers)
        kept = self._kept.get(members)
        number = next(self._numbers)
        name = kept.name if kept is not None else f"group{number}"
        cancelled = threading.Event()
        thread = threading.Thread(target=self._send, args=(name, members, cancelled), daemon=True)
        self._sending = {key: own for key, own in self._sending.items() if own[0].is_alive()}
        self._sending[number] = (thread, cancelled)
        thread.start()
        notice = {
            "transport": "broadcast",
            "version": self.version,
            "digest": self.digest,
            "address": [self.host, self.store.port],
            "group": name,
            "transfer": number,
            "size": len(members) + 1,
            "bucket_bytes": self.bucket_bytes,
        }
        return [notice | {"rank": rank} for rank in range(1, len(members) + 1)]

    def cancel(self, notice: dict[str, Any]) -> None:
        """Aborts the transfer of a notice if its workers have not all joined yet."""
        if notice["transfer"] in self._sending:
            self._sending[notice["transfer"]][1].set()

    def close(self) -> None:
        for thread, cancelled in self._sending.values():
            cancelled.set()
            thread.join(TIMEOUT_SECONDS)
        self._let_go()

    def _send(self, name: str, members: tuple[str, ...], cancelled: threading.Event) -> None:
        """Sends the newest weights; workers report a failure themselves."""
        with self._one_at_a_time:
            try:
                channel = self._kept.get(members)
                if channel is None or channel.name != name:
                    self._let_go()
                    size = len(members) + 1
                    channel = Channel(self.store, name, 0, size, self.device, cancelled, self.bucket_bytes)
                    self._kept[members] = channel
                channel.send(self._weights)
            except RuntimeError:  # what gloo, NCCL and the store raise, and `TransferInterrupted`
                self._let_go()

    def _let_go(self) -> None:
        while self._kept:
            self._kept.popitem()[1].close()


class BroadcastReader:
    """The worker's end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stores: dict[tuple[str, int], dist.TCPStore] = {}
        self._kept: Channel | None = None

    def read(self, notice: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        try:
            weights = self._channel(notice).receive()
        except RuntimeError as error:  # what gloo, NCCL and the store raise
            self._let_go()
            raise TransferInterrupted(str(error)) from None
        check_digest(weights_digest(weights), notice)
        return weights

    def _channel(self, notice: dict[str, Any]) -> Channel:
        if self._kept is None or self._kept.name != notice["group"]:
            self._let_go()
            host, port = notice["address"]
            if (host, port) not in self._stores:
                self._stores[host, port] = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
            self._kept = Channel(
                self._stores[host, port],
                notice["group"],
                notice["rank"],
                notice["size"],
                self.device,
                bucket_bytes=notice["bucket_bytes"],
            )
        return self._kept

    def _let_go(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None


class _Scatter:
    """Fills tensors one after the other with the bytes of a stream."""

    def __init__(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._views = [_bytes(tensor) for _, tensor in weights if tensor.nbytes]
        self._index = 0
        self._filled = 0

    def take(self, data: torch.Tensor) -> None:
        while len(data):
            view = self._views[self._index]
            count = min(len(data), len(view) - self._filled)
            view[self._filled : self._filled + count] = data[:count]
            data = data[count:]
            self._filled += count
            if self._filled == len(view):
                self._index += 1
                self._filled = 0


def _fill(
    weights: Sequence[tuple[str, torch.Tensor]], buckets: Iterator[torch.Tensor], under_way: list[Any]
) -> Iterator[torch.Tensor]:
    """Yields full buckets, and the last one as far as it is filled; waits before it fills one again."""
    number = used = 0
    bucket = next(buckets)
    for _, tensor in weights:
        data = _bytes(tensor.detach().contiguous())
        while len(data):
            if not used:
                _finish(under_way[number % 2])
            count = min(len(data), len(bucket) - used)
            bucket[used : used + count] = data[:count]
            data = data[count:]
            used += count
            if used == len(bucket):
                yield bucket
                number += 1
                used = 0
                bucket = next(buckets)
    if used:
        yield bucket[:used]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _from_source() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options


def _finish(work: Any) -> None:
    if work is None:
        return
    try:
        work.wait()
    except RuntimeError as error:
        raise TransferInterrupted(str(error)) from None


def _gather(store: dist.Store, size: int, cancelled: threading.Event | None) -> None:
    """Waits until every worker has joined and releases them, or gives up and notifies them."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    names = [f"joined/{rank}" for rank in range(size)]
    while not store.check(names):
        late = time.monotonic() > deadline
        if late or (cancelled is not None and cancelled.is_set()):
            missing = [rank for rank, name in enumerate(names) if not store.check([name])]
            store.set("go", "cancelled")
            raise TransferInterrupted(f"ranks {missing} did not join")
        time.sleep(POLL_SECONDS)
    store.set("go", "go")


def _answer(store: dist.Store) -> bytes:
    store.wait(["go"], timedelta(seconds=TIMEOUT_SECONDS))
    return bytes(store.get("go"))
