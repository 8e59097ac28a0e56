"""How a trained head reaches the drafter, and is rolled back when it turns out worse.

    trainer's own copy ──publish(version)──▶ the drafting head: here, in a worker, in another engine
            ▲                                        │ its acceptance in the next rollout
            └──── weights of the version before ◀────┘ clearly lower, and on the same texts, too

The trainer never writes where proposals are computed. A head that begins to learn drafts only when it is as
good as the one that does, along the newest responses: a few updates make a good head worse. Later ones are
watched. A fall in acceptance may be the policy's doing, so before a head is rolled back both versions are
compared in the same way.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.when import SIGMAS, TOLERANCE, deviation
from paceline.policy.states import to_host

# How well a head of these weights drafts along the newest texts; None: there are no texts to judge by.
Quality = Callable[[Mapping[str, torch.Tensor]], float | None]
# Updates after which a head that began to learn is compared with the one that drafts; where it is worse,
# after as many again, up to
FIRST_COMPARED = 4
# these, after which it is given up; `always` keeps comparing it at this interval.
HOPELESS = 16
# Steps without texts to judge a head by, after which the comparison is no longer waited for.
UNANSWERED = 4


class Drafting(Protocol):
    """The part of a generator's speculation that takes heads (`backend.Speculation`)."""

    def publish_drafter(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Receives a trained head."""


@dataclass
class Probation:
    """Whether a head that learns may draft, by the updates that it has seen."""

    proven: bool = False
    next_at: int = FIRST_COMPARED
    unanswered: int = 0  # times that it was to be compared, and there were no texts to judge by

    def passes(self, updates: int, learned: Mapping, drafting: Mapping, quality: Quality) -> bool:
        """Returns whether `learned` may draft; compares it with `drafting` where that is not known yet."""
        if self.is_due(updates):
            ours, theirs = quality(learned), quality(drafting)
            if ours is None or theirs is None:
                self.unanswered += 1
            else:
                self.proven, self.unanswered = ours >= theirs, 0
                self.next_at = min(2 * updates, HOPELESS) if updates < HOPELESS else updates + HOPELESS
        return self.proven

    def is_due(self, updates: int) -> bool:
        return not self.proven and updates >= self.next_at

    def is_hopeless(self, updates: int) -> bool:
        """Returns whether it was worse after so long that more of it would not help."""
        was_compared = self.next_at > HOPELESS or self.unanswered >= UNANSWERED
        return not self.proven and updates >= HOPELESS and was_compared


@dataclass
class Published:
    """A version of the head, and its acceptance."""

    version: int
    weights: dict[str, torch.Tensor]  # on the host; complete once the GPU's stream has copied them
    share: float = 0.0  # of drafts whose first token was accepted, in its last rollout
    drafts: int = 0


class HeadPublisher:
    """Publishes versions of a head, and remembers the one before the newest."""

    def __init__(self, head: EagleHead, drafting: Drafting | None, warn: Callable[[str], None]) -> None:
        """`drafting` is None where no engine drafts, such as in a plan."""
        self.head = head
        self.drafting = drafting
        self.warn = warn
        self.current = Published(0, snapshot(head))
        self.before: Published | None = None
        self.suspect = False
        self.unanswered = 0  # times that it was to be compared, and there were no texts to judge by
        self.rollbacks = 0
        self._is_fresh = False  # the newest version, which may have drafted since

    def publish(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Publishes these weights, which may be on any device."""
        # What has not drafted yet is no measure for the next.
        if self.current.drafts:
            self.before = self.current
        self._is_fresh, self.unanswered = True, 0
        self.current = Published(version, {name: to_host(tensor) for name, tensor in weights.items()})
        self._send(weights)

    def observe(self, share: float, drafts: int) -> None:
        """Records the acceptance of the newest version; one clearly below the last is suspect."""
        self.current.share, self.current.drafts = share, drafts
        before = self.before
        self.suspect = before is not None and share < before.share - max(
            TOLERANCE, SIGMAS * deviation(before.share, before.drafts, share, drafts)
        )

    @property
    def watches(self) -> bool:
        """Whether the newest version is, or may turn out, worse than the one before."""
        return self.before is not None and (self.suspect or self._is_fresh)

    def settle(self, version: int, quality: Quality) -> bool:
        """Rolls a suspect head back if the one before is clearly better; returns whether it was.

        Where there are no texts to judge by, the next step tries again.
        """
        self._is_fresh = False
        if not self.suspect or self.before is None:
            return False
        before, worse = self.before, self.current
        now, then = quality(worse.weights), quality(before.weights)
        if now is None or then is None:
            self.unanswered += 1
            if self.unanswered < UNANSWERED:
                return False
        self.suspect, self.before = False, None
        if now is None or then is None or then <= now + TOLERANCE:
            return False  # the policy has become harder to draft for, the head has not become worse
        self.rollbacks += 1
        self.warn(
            f"the eagle head of version {worse.version} drafts worse than that of version {before.version} "
            f"(first token accepted {worse.share:.1%} after {before.share:.1%}; along the newest responses "
            f"overlap {now:.3f} against {then:.3f}): rolled back"
        )
        restore(self.head, before.weights)
        self.current = Published(version, before.weights)
        self._send(before.weights)
        return True

    def _send(self, weights: Mapping[str, torch.Tensor]) -> None:
        if self.drafting is not None:
            self.drafting.publish_drafter(self.current.version, weights)


def snapshot(head: EagleHead) -> dict[str, torch.Tensor]:
    """Returns copies of a head's parameters on the host: they share no memory with the head."""
    if head.fc.weight.is_meta:
        return {}
    return {name: p.detach().to("cpu", copy=True) for name, p in head.named_parameters()}


@torch.no_grad()
def restore(head: EagleHead, weights: Mapping[str, torch.Tensor]) -> None:
    """Fills a head's own storage."""
    for name, parameter in head.named_parameters():
        parameter.copy_(weights[name])
