"""A head that follows the policy, wherever it learns: its own copy, when it is due, what is published of it.

`online.py` learns in the run's own process, `remote_online.py` receives what other processes learned.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from paceline.config import OnlineDrafterConfig
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.publishing import Drafting, HeadPublisher, Probation, restore, snapshot
from paceline.drafting.when import AutoMonitor, DriftMonitor
from paceline.policy.decoder import Decoder
from paceline.policy.states import TextStates
from paceline.types import Group


class HeadFollower(ABC):
    """A copy of the drafting head that is to follow the policy, and its publisher."""

    name = EagleDrafter.name

    def __init__(
        self,
        policy: Decoder,
        head: EagleHead,
        config: OnlineDrafterConfig,
        warn: Callable[[str], None],
        drafting: Drafting | None = None,
    ) -> None:
        self.policy = policy
        self.config = config
        self.warn = warn
        self.head = copy.deepcopy(head)
        self.publisher = HeadPublisher(self.head, drafting, warn)
        self.probation = Probation()
        self.drift = DriftMonitor()
        self.auto = AutoMonitor()
        self.due = config.when in ("always", "auto")

    def observe(self, share: float, drafts: int) -> None:
        """Records the share of a rollout's drafts whose first token was accepted; no-op without drafts."""
        if not drafts:
            return
        self.publisher.observe(share, drafts)
        if self.config.when == "drift":
            self.due = self.drift.update(share, drafts)
        if self.config.when == "auto":
            self.due = self.auto.update(share, drafts)

    def take_head(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replaces the head by these weights, and publishes them."""
        restore(self.head, weights)
        self.publish(version)

    def publish(self, version: int) -> None:
        """Publishes what the head has learned."""
        self.publisher.publish(version, self.learned_weights())
        self.drift.note_update()

    def learned_weights(self) -> dict[str, torch.Tensor]:
        """Returns the learned weights on the head's device; the caller owns them."""
        return {name: p.detach().clone() for name, p in self.head.named_parameters()}

    @property
    def has_learned(self) -> bool:
        """Whether anything was learned that is to be kept."""
        return self.publisher.current.version > 0

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns copies of the weights that are worth drafting with, on the host."""
        return snapshot(self.head)

    def head_to_keep(self) -> EagleHead:
        """Returns a head on the host with the weights that are worth keeping, in the policy's own type."""
        weights = self.weights()
        own = {id(p): nn.Parameter(weights[name]) for name, p in self.head.named_parameters()}
        return copy.deepcopy(self.head, own).to("cpu", self.policy.dtype)

    # -- the order of a step ----------------------------------------------------------------------

    def while_generating(self) -> AbstractContextManager[None]:
        """Returns a context for the rollout, in which others may learn."""
        return nullcontext()

    @abstractmethod
    def expect(self, groups: Sequence[Group]) -> None:
        """Called with the responses that the policy is about to learn from."""

    @property
    def wants_states(self) -> bool:
        """Whether the engine is to record the policy's states."""
        return self.due

    def charge(self, seconds: float) -> None:  # noqa: B027  (a head that learns elsewhere counts there)
        """Records time that the engine or the learner spent on behalf of the head."""

    def note_wait(self, seconds: float) -> None:  # noqa: B027  (as above)
        """Records the reward wait of a step as idle time."""

    @property
    @abstractmethod
    def needs_memory(self) -> bool:
        """Whether `follow` will compute where the policy learns."""

    @abstractmethod
    def follow(
        self, step: int, recorded: Mapping[tuple[int, ...], TextStates], step_seconds: float = 0.0
    ) -> dict[str, float]:
        """Learns, or receives what was learned, after the policy's update; returns metrics."""
