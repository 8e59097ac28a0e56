"""A head that learns in the replicas of a run, in their idle time; here it is published.

    rollout        replicas without work ──▶ slices on their own copies      (`cluster/idle_training.py`)
    learning       what they came to, as a mean counted by tokens ──▶ here
    after it       is it as good as the head that drafts? ──▶ publish the mean, or keep learning from it
                   the newest head's acceptance ──▶ roll a worse head back

Whether what was learned may draft is judged along texts of the newest rollout, before what was learned from
them is received. The copy here is in float32 at least: in bf16 small steps of several terms would be rounded
away.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from paceline.config import Config, OnlineDrafterConfig
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.follower import HeadFollower
from paceline.drafting.online import make_online
from paceline.drafting.publishing import Drafting, Probation, restore, snapshot
from paceline.drafting.when import DriftMonitor
from paceline.policy.decoder import Decoder
from paceline.policy.states import TextStates
from paceline.types import Group


@dataclass
class Learned:
    """What the replicas did in one rollout's idle time."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # their mean; empty: no replica learned
    tokens: float = 0.0
    updates: int = 0
    replicas: int = 0  # that learned something
    seconds: float = 0.0  # of training, of all replicas
    waited: float = 0.0  # that messages to them waited for a slice to end, in all
    longest_wait: float = 0.0


class Trainers(Protocol):
    """The replicas, as the publisher sees them."""

    def begin_rollout(self, start: Mapping[str, torch.Tensor] | None = None) -> None:
        """Lets replicas that run out of work train from now on, from `start` or what was published."""

    def end_rollout(self) -> None:
        """Makes all of them stop, without waiting for it."""

    def take(self, seconds: float) -> Learned | None:
        """Returns what the last rollout's idle time gave; None: nothing, or not within so many seconds."""

    def quality(self, weights: Mapping[str, torch.Tensor]) -> float | None:
        """Returns how well a head of these weights drafts along the replicas' newest texts; None: no text."""


class RemoteOnlineDrafter(HeadFollower):
    """Publishes what replicas learned, once per step, as soon as it is as good as what drafts."""

    def __init__(
        self,
        policy: Decoder,
        head: EagleHead,
        config: OnlineDrafterConfig,
        warn: Callable[[str], None],
        drafting: Drafting,
        trainers: Trainers,
    ) -> None:
        wide = head if head.fc.weight.dtype.itemsize >= 4 else copy.deepcopy(head).float()
        super().__init__(policy, wide, config, warn, drafting)
        self.trainers = trainers
        self.updates = 0.0  # that the copy here has seen, since it was what drafted; a replica's, in the mean

    needs_memory = False  # nothing is computed here

    def expect(self, groups: Sequence[Group]) -> None:
        """Does nothing: replicas learn from the states of their own steps."""

    @contextmanager
    def while_generating(self) -> Iterator[None]:
        """Lets replicas without work train within, if the head is due."""
        if not self.due:
            yield
            return
        self.trainers.begin_rollout(snapshot(self.head) if self._is_on_trial else None)
        try:
            yield
        finally:
            self.trainers.end_rollout()

    def follow(
        self, step: int, recorded: Mapping[tuple[int, ...], TextStates], step_seconds: float = 0.0
    ) -> dict[str, float]:
        """Receives what was learned in the step's rollout, publishes it, or rolls a worse head back.

        A replica that has not answered yet may delay the step by no more than its budget. Returns metrics.
        """
        began = time.perf_counter()
        learned = self.trainers.take(self.config.budget * step_seconds) or Learned()
        proven = self.probation.proven
        if self.publisher.settle(step, self.trainers.quality):  # what began from a worse head goes with it
            self._restart()
        elif self._prove() and learned.weights:
            restore(self.head, learned.weights)
            self.updates += learned.updates / max(1, learned.replicas)
        if self.probation.proven and (learned.weights or not proven):
            self.publish(step)
        displaced = learned.waited + time.perf_counter() - began
        return {
            "drafter/updates": float(learned.updates),
            "drafter/tokens": learned.tokens,
            "drafter/trainers": float(learned.replicas),
            "drafter/version": float(self.publisher.current.version),
            "drafter/rollbacks": float(self.publisher.rollbacks),
            "time/drafter_idle": learned.seconds,
            "time/drafter_displaced": displaced,
            "time/drafter_stop": learned.longest_wait,
        }

    @property
    def _is_on_trial(self) -> bool:
        """Whether something was learned that does not draft yet."""
        return self.updates > 0 and not self.probation.proven

    def _prove(self) -> bool:
        """Decides whether what was learned may draft; returns False where it is dropped."""
        if not self._is_on_trial:
            return True
        updates = int(self.updates)
        if self.probation.is_due(updates):
            drafting = self.publisher.current.weights
            if self.probation.passes(updates, snapshot(self.head), drafting, self.trainers.quality):
                return True
        hopeless = self.config.when != "always" and self.probation.is_hopeless(updates)
        if hopeless and self.config.when == "drift":
            self.drift = DriftMonitor()
            self.due = False
        if hopeless or not self.due:
            restore(self.head, self.publisher.current.weights)
            self._restart()
            return False
        return True

    def _restart(self) -> None:
        """The head here is the one that drafts: what is learned from now on must be as good."""
        self.probation = Probation()
        self.updates = 0.0

    @property
    def has_learned(self) -> bool:
        return self.updates > 0 or super().has_learned

    def take_head(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self._restart()
        super().take_head(weights, version)

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.publisher.current.weights) if self._is_on_trial else super().weights()


def make_follower(
    policy: Decoder,
    head: nn.Module | None,
    config: Config,
    warn: Callable[[str], None],
    drafting: Drafting | None,
    trainers: Trainers | None,
) -> HeadFollower | None:
    """Returns what lets `head`, or one like it, follow the policy; None where nothing is to learn.

    `drafting` receives the trained head; it learns in `trainers`, or here where there are none.
    """
    if trainers is None or drafting is None:
        return make_online(policy, head, config, warn, drafting)
    assert isinstance(head, EagleHead), "those that can train have one"
    return RemoteOnlineDrafter(policy, head, config.rollout.speculation.online, warn, drafting, trainers)
