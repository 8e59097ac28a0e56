"""The drafters of several replicas, as far as they can be reached from here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.cluster.replica import Replica
from paceline.worker.capabilities import Caller, RemoteSpeculation
from paceline.worker.codec import read_tensors, tensor_arrays
from paceline.worker.wire import Message


class Pool(Caller, Protocol):
    """The pool, as its drafters see it."""

    @property
    def live(self) -> list[Replica]:
        """The replicas that have not been dropped."""

    def ask_all(self, message: Message) -> list[tuple[Replica, Message]]:
        """Returns the answers of the replicas that are ready."""


@dataclass
class PoolSpeculation(RemoteSpeculation):
    """The replicas' drafters: all get the same head, each keeps its own observations.

    In a checkpoint the first replica's drafters have their own names, as in a single process, and the others'
    begin with `replica<number>.`; a replica that a checkpoint does not know starts from the first one's.
    """

    backend: Pool

    def drafter_state(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        for replica, answer in self.backend.ask_all(Message("drafter_state")):
            own = read_tensors(answer.fields["tensors"], answer.arrays)
            prefix = f"replica{replica.number}." if state else ""
            state |= {f"{prefix}{name}": tensor for name, tensor in own.items()}
        return state

    def load_drafter_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores what `drafter_state` returned, here or in a single process."""
        first = {name: tensor for name, tensor in tensors.items() if not name.startswith("replica")}
        for replica in self.backend.live:
            prefix = f"replica{replica.number}."
            own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            names, arrays = tensor_arrays(own or first)
            replica.client.ask(Message("load_drafter_state", {"tensors": names}, arrays))
