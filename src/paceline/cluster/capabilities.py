"""What the generator of a pool can do beyond generating, as far as another process can reach it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline.backend import LowPrecision, Speculation
from paceline.worker.client import Restored, WorkerClient
from paceline.worker.codec import tensors_message, tensors_of
from paceline.worker.wire import Message


class Pool(Protocol):
    """The pool, as its capabilities see it."""

    restored: Restored

    @property
    def description(self) -> dict[str, Any]:
        """What a worker said of its generator."""

    @property
    def live(self) -> list[WorkerClient]:
        """The replicas that have not been dropped."""

    def call_all(self, message: Message) -> list[tuple[WorkerClient, Message]]:
        """Returns the answers of the replicas that are ready."""


@dataclass
class RemoteSpeculation(Speculation):
    """The replicas' drafters: all get the same head, each keeps its own observations.

    The pacers live in the workers; this process can neither switch them off nor save them. In a checkpoint
    the first replica's drafters have their own names, as in a single process, and the others' begin with
    `replica<number>.`; a replica that a checkpoint does not know starts from the first one's.
    """

    pool: Pool

    @property
    def keeps_tokens(self) -> bool:
        return bool(self.pool.description["keeps_tokens"])

    def publish_drafter(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Sends a trained head to the replicas; keeps a copy for replacements."""
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}
        self.pool.restored.published = tensors_message("publish_drafter", copies, version=version)
        self.pool.call_all(self.pool.restored.published)

    def drafter_state(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        for replica, answer in self.pool.call_all(Message("drafter_state")):
            prefix = f"replica{replica.number}." if state else ""
            state |= {f"{prefix}{name}": tensor for name, tensor in tensors_of(answer).items()}
        return state

    def load_drafter_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores what `drafter_state` returned, here or in a single process."""
        first = {name: tensor for name, tensor in tensors.items() if not name.startswith("replica")}
        for replica in self.pool.live:
            prefix = f"replica{replica.number}."
            own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            replica.call(tensors_message("load_drafter_state", own or first))


@dataclass
class RemotePrecision(LowPrecision):
    """The workers' low precision; its scales do not depend on the learner."""

    pool: Pool

    def kv_scales(self, layer: int) -> None:
        """Returns nothing: an FP8 cache is refused where the learner is in another process."""

    def in_base_precision(self) -> AbstractContextManager[None]:
        raise NotImplementedError("eval.precision=base is refused where another process generates")

    def fall_back_to_base_precision(self) -> None:
        self.pool.restored.fell_back = True
        self.pool.call_all(Message("fall_back"))

    def load_calibration_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """No-op: an FP8 cache is refused where the learner is in another process."""
