"""One process of several that learn together: joining, and messages between ranks.

Messages between hosts (numbers of micro-batches, names, digests) are CPU tensors and travel over gloo;
gradients and parameters travel where they are, on a GPU over NCCL.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline.learning.distributed.adapters import (
    merge_sharded_adapters,
    shard_bases,
    sharded_adapters_off,
)
from paceline.learning.distributed.faults import RanksLost, RollCall
from paceline.learning.distributed.sharding import local, rows_of, shard_policy
from paceline.learning.ranks import Forward
from paceline.policy.decoder import Decoder

# How long a collective may take before the ranks that are missing are named.
TIMEOUT_SECONDS = 600.0
# How long a rank may take to reach the store that it serves itself, however slow the machine.
OWN_STORE_SECONDS = 60.0


class DecidedElsewhere(RuntimeError):
    """Raised on the other ranks when the first rank's decision raises."""


class RankGroup:
    """This process as one of the ranks (`Ranks` of `learning/ranks.py`); `join_ranks` makes it."""

    def __init__(self, rank: int, count: int, mesh: DeviceMesh, roll_call: RollCall) -> None:
        self.rank = rank
        self.count = count
        self.mesh = mesh
        self.roll_call = roll_call

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Wraps what all ranks do at once: if one fails or is lost, all raise and name it with the reason."""
        with self.roll_call.watching(what):
            yield

    def leave(self) -> None:
        """Leaves the group; the process may join other ranks later."""
        self.roll_call.close()

    # -- what the learner asks -----------------------------------------------------------------------

    def shard(self, policy: Decoder) -> Forward:
        forward = shard_policy(policy, self.mesh)
        shard_bases(policy, self.rank, self.count)
        return forward

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return local(tensor)

    def rows(self, tensor: torch.Tensor) -> range:
        return rows_of(tensor, self.rank, self.count)

    def norm(self, norms: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        squares = torch.zeros((), dtype=torch.float64, device=device)
        for norm in norms:
            squares += norm.double().square()
        dist.all_reduce(squares)
        dtype = norms[0].dtype if norms else torch.float32
        return squares.sqrt().to(dtype)

    def gather(self, own: Sequence[torch.Tensor]) -> list[list[list[float]]]:
        lengths = torch.tensor([len(values) for values in own])
        by_rank = [torch.empty_like(lengths) for _ in range(self.count)]
        dist.all_gather(by_rank, lengths)
        most = max(int(found.sum()) for found in by_rank)
        numbers = torch.zeros(most, dtype=torch.float64)
        numbers[: int(lengths.sum())] = torch.cat(list(own)).cpu()
        found = [torch.empty_like(numbers) for _ in range(self.count)]
        dist.all_gather(found, numbers)
        parts = [
            values[: int(sizes.sum())].split(sizes.tolist())
            for values, sizes in zip(found, by_rank, strict=True)
        ]
        return [[values.tolist() for values in by_round] for by_round in zip(*parts, strict=True)]

    def decide(self, question: Callable[[], None]) -> None:
        """Calls `question` on the first rank; its error is raised on all, elsewhere as `DecidedElsewhere`."""
        raised: Exception | None = None
        if self.rank == 0:
            try:
                question()
            except Exception as error:
                raised = error
        answer = self.texts("" if raised is None else f"{type(raised).__name__}: {raised}")[0]
        if answer:
            self.roll_call.agreed = raised or DecidedElsewhere(answer)
            raise self.roll_call.agreed

    def merge_adapters(self, policy: Decoder) -> None:
        merge_sharded_adapters(policy, self.rank, self.count)

    def adapters_off(self, policy: Decoder) -> AbstractContextManager[None]:
        return sharded_adapters_off(policy, self.rank, self.count)

    # -- messages ------------------------------------------------------------------------------------

    def texts(self, own: str) -> list[str]:
        data = torch.frombuffer(bytearray(own.encode() + b"\n"), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(data)]))
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        found = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(found, padded)
        return [
            bytes(text[: int(size) - 1].tolist()).decode() for text, size in zip(found, sizes, strict=True)
        ]


def join_ranks(
    address: str,
    port: int,
    rank: int,
    count: int,
    device: str | torch.device = "cpu",
    timeout: float = TIMEOUT_SECONDS,
    listener: socket.socket | None = None,
) -> RankGroup:
    """Makes this process rank `rank` of `count`, and returns when all have joined.

    The first rank listens on `address:port`, through `listener` if it already does. On a GPU (`device`
    "cuda:0") collectives run over NCCL, on a CPU over gloo. Where some do not join within `timeout` seconds,
    the error names them.
    """
    device = torch.device(device)
    wait = timedelta(seconds=timeout)
    stores = _open_store(address, port, rank, count, wait, listener)
    roll_call = RollCall(*stores, rank, count, timeout)
    roll_call.all_present()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("collectives", roll_call.store),
        rank=rank,
        world_size=count,
        timeout=wait,
    )
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    return RankGroup(rank, count, mesh, roll_call)


def _open_store(
    address: str,
    port: int,
    rank: int,
    count: int,
    timeout: timedelta,
    listener: socket.socket | None,
) -> tuple[dist.TCPStore, dist.TCPStore]:
    """Returns two connections to the store, which the first rank serves."""
    serves = rank == 0
    patience = max(timeout, timedelta(seconds=OWN_STORE_SECONDS)) if serves else timeout
    try:
        store = dist.TCPStore(
            address,
            port,
            is_master=serves,
            timeout=patience,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if serves and listener is not None else None,
        )
        other = dist.TCPStore(address, port, timeout=patience, wait_for_workers=False)
    except dist.DistError as error:
        if serves:
            raise RanksLost(f"rank 0 of {count} cannot listen on port {port}: {error}", (0,)) from error
        raise RanksLost(
            f"rank {rank} of {count} does not reach the ranks' store at {address}:{port} within "
            f"{timeout.total_seconds():g} s: {error}",
            (0,),
        ) from error
    for connection in (store, other):
        connection.set_timeout(timeout)
    return store, other
