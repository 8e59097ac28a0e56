"""What a hosted backend can do beyond generating, as far as another process can reach it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from paceline.pacing.strategy import Pacer
from paceline.policy.attention import AttentionObserver
from paceline.worker.codec import publish_message, read_tensors, tensor_arrays
from paceline.worker.wire import Message


class Caller(Protocol):
    """The client, as its capabilities see it."""

    description: dict
    published: Message | None  # the message with the newest head, for a replacement worker
    fell_back: bool

    def call(self, message: Message) -> Message:
        """Asks the worker and returns its answer."""


@dataclass
class RemoteSpeculation:
    """The worker's drafters, as far as another process can reach them."""

    backend: Caller
    # The pacer lives in the worker; this process can neither switch it off nor save it.
    pacer: Pacer | None = None

    @property
    def keeps_tokens(self) -> bool:
        return bool(self.backend.description["keeps_tokens"])

    @property
    def trainable_head(self) -> nn.Module | None:
        """None: the head that drafts lies in the worker."""
        return None

    def publish_drafter(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Sends a trained head to the worker; keeps a copy for a replacement worker."""
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}
        self.backend.published = publish_message(version, copies)
        self.backend.call(self.backend.published)

    def drafter_state(self) -> dict[str, torch.Tensor]:
        answer = self.backend.call(Message("drafter_state"))
        return read_tensors(answer.fields["tensors"], answer.arrays)

    def load_drafter_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        names, arrays = tensor_arrays(tensors)
        self.backend.call(Message("load_drafter_state", {"tensors": names}, arrays))


@dataclass
class RemotePrecision:
    """The worker's low precision; its scales do not depend on the learner."""

    backend: Caller
    attention_observer: AttentionObserver | None = None

    def kv_scales(self, layer: int) -> None:
        """Returns nothing: an FP8 cache is refused where the learner is in another process."""

    def in_base_precision(self) -> AbstractContextManager[None]:
        raise NotImplementedError("eval.precision=base is refused where another process generates")

    def fall_back_to_base_precision(self) -> None:
        self.backend.fell_back = True
        self.backend.description = self.backend.call(Message("fall_back")).fields

    def calibration_state(self) -> dict[str, torch.Tensor]:
        """Returns nothing: an FP8 cache is refused where the learner is in another process."""
        return {}

    def load_calibration_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes nothing over."""
