"""A head that learns in the replicas of a run, in time that they do not need; here it is published.

    rollout        replicas without work ──▶ slices on their own copies      (`cluster/idle_training.py`)
    learning       what they came to, as a mean counted by tokens ──▶ here
    after it       the newest head's acceptance ──▶ publish the mean, or take a worse head back

The copy here is in float32 at least: in bf16 small steps of several terms would be rounded away.
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
from paceline.drafting.publishing import Drafting, restore
from paceline.policy.decoder import Decoder
from paceline.policy.states import TextStates
from paceline.types import Group


@dataclass
class Learned:
    """What the replicas did in one rollout's idle time."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # their mean; empty: nobody learned
    tokens: float = 0.0
    updates: int = 0
    replicas: int = 0  # that learned something
    seconds: float = 0.0  # of training, of all replicas
    waited: float = 0.0  # that messages to them waited for a slice to end, in all
    longest_wait: float = 0.0


class Trainers(Protocol):
    """The replicas, as the one who publishes sees them."""

    def begin_rollout(self) -> None:
        """Lets replicas that run out of work train from now on."""

    def end_rollout(self) -> None:
        """Makes all of them stop, without waiting for it."""

    def take(self, seconds: float) -> Learned | None:
        """Returns what the last rollout's idle time came to; None: not within so many seconds, or nothing."""

    def quality(self, weights: Mapping[str, torch.Tensor]) -> float:
        """Returns how well a head of these weights drafts along the replicas' newest texts."""


class RemoteOnlineDrafter(HeadFollower):
    """Publishes what replicas learned, once per step."""

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

    needs_memory = False  # nothing is computed here

    def expect(self, groups: Sequence[Group]) -> None:
        """Does nothing: replicas learn from the states of their own steps."""

    @contextmanager
    def while_generating(self) -> Iterator[None]:
        """Lets replicas without work train within, if the head is due."""
        if not self.due:
            yield
            return
        self.trainers.begin_rollout()
        try:
            yield
        finally:
            self.trainers.end_rollout()

    def follow(
        self, step: int, recorded: Mapping[tuple[int, ...], TextStates], step_seconds: float = 0.0
    ) -> dict[str, float]:
        """Publishes what was learned in the step's rollout, or takes a worse head back; returns metrics.

        A replica that has not answered yet may delay the step by no more than its budget.
        """
        began = time.perf_counter()
        learned = self.trainers.take(self.config.budget * step_seconds) or Learned()
        rolled_back = self.publisher.settle(step, self.trainers.quality)
        if learned.weights and not rolled_back:  # what began from a worse head goes with it
            restore(self.head, learned.weights)
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


def make_follower(
    policy: Decoder,
    head: nn.Module | None,
    config: Config,
    warn: Callable[[str], None],
    drafting: Drafting | None,
    trainers: Trainers | None,
) -> HeadFollower | None:
    """Returns what lets `head`, or one like it, follow the policy; None where nothing is to learn.

    `drafting` takes the trained head over; it learns in `trainers`, or here where there are none.
    """
    if trainers is None or drafting is None:
        return make_online(policy, head, config, warn, drafting)
    assert isinstance(head, EagleHead), "those that can train have one"
    return RemoteOnlineDrafter(policy, head, config.rollout.speculation.online, warn, drafting, trainers)
