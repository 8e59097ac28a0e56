"""An eagle head that follows the policy while it learns.

    learner's forward ──states of long responses──▶ updates here ─────────┐
    engines' steps, in replicas ──states──▶ updates in the tail, a mean ──┴▶ published ──▶ accept length
                                                                                 ▲             │
                                 the head that this stretch of updates began from └── better ───┘

One rule. The recipe grants a share of the steps' time, and the second step tells how many updates that is.
The clock is not read after it, and the number is part of a checkpoint. In replicas the tail decides instead.
After 16 updates that brought nothing the head rests: one update in 20 steps tells when it no longer follows
the policy.

One judge. A stretch is those 16 updates. Where the head that it has come to drafts worse than the one it
began from, the earlier one drafts for a rollout of the same policy, and the better of the two stays.
Completions do not depend on any of this, and whether a head drafts at all is the pacer's decision.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from paceline.config import OnlineDrafterConfig
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.examples import longest_texts
from paceline.drafting.head_learner import HeadLearner
from paceline.drafting.state_tap import StateTap
from paceline.policy.decoder import Decoder
from paceline.types import Group

# Updates of a stretch, and what the second half must see more of the overlap than the first to have brought
# anything: this, and more than chance explains.
STRETCH = 16
RISE = 0.003
# A head that rests makes one update in so many steps, and is awake again when that sees so much less overlap.
RESTING_STEPS = 20
FALL = 0.02
# Standard deviations by which a rollout's accepted tokens must fall for it to be no chance.
SIGMAS = 3.0
# Bytes of the device for the states that a step's updates learn from, and how many tokens have them for each
# one that is needed: passages of few texts are much alike.
STATE_BYTES = 512_000_000
SPREAD = 2
# Of the names of its tensors in a checkpoint; what it counts there.
PREFIX = "online."
COUNTERS = (
    "share",
    "moved",
    "on_trial",
    "resting_below",
    "version",
    "rollbacks",
    "rate",
    "measured",
    "steps",
)


class Drafting(Protocol):
    """The part of a generator's speculation that takes heads (`backend.Speculation`)."""

    def publish_drafter(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Receives a trained head."""


@dataclass
class Learned:
    """What updates of a step, or of a rollout's idle time in all replicas, have come to."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # their mean; empty: there were none
    overlaps: list[float] = field(default_factory=list)  # with the policy, that each update saw
    updates: int = 0
    tokens: float = 0.0
    replicas: int = 0  # that learned something
    seconds: float = 0.0  # of idle time, of all replicas
    waited: float = 0.0  # that messages to them waited for training to stop, in all
    finite: bool = True


class Trainers(Protocol):
    """The replicas that train in the tail, as the publisher sees them."""

    def begin_rollout(self) -> None:
        """Lets replicas that run out of work train from now on, from what was published last."""

    def end_rollout(self) -> None:
        """Makes all of them stop, without waiting for it."""

    def take(self, seconds: float) -> Learned | None:
        """Returns what the last rollout's idle time gave; None: nothing, or not within so many seconds."""


@dataclass
class Accepted:
    """The tokens that a rollout accepted of a drafter's proposals."""

    mean: float  # of a draft
    drafts: float
    most: float  # that a draft has

    def is_below(self, other: "Accepted") -> bool:
        """Whether the mean is lower than chance explains; a mean within bounds bounds the variance."""
        variance = sum(a.mean * max(0.0, a.most - a.mean) / a.drafts for a in (self, other))
        return self.mean < other.mean - SIGMAS * math.sqrt(variance)


class OnlineHead:
    """A head that learns during a run, by the rule above."""

    name = EagleDrafter.name

    def __init__(
        self,
        policy: Decoder,
        head: EagleHead,
        config: OnlineDrafterConfig,
        seed: int,
        warn: Callable[[str], None],
        drafting: Drafting | None = None,
        trainers: Trainers | None = None,
    ) -> None:
        """`drafting` receives the head, if an engine drafts; with `trainers` replicas make the updates."""
        self.config = config
        self.warn = warn
        self.drafting = drafting
        self.trainers = trainers
        self.learner = HeadLearner(policy, head, config, seed, warn) if trainers is None else None
        self.tap = StateTap(head.config.captured_layers)
        state_bytes = (
            (len(head.config.captured_layers) + 1) * policy.config.hidden_size * policy.dtype.itemsize
        )
        self.room = STATE_BYTES // state_bytes  # tokens of a step whose states are kept
        # The head that the stretch began from, and what replicas learned; on the host, and never changed.
        self.earlier = self.received = _on_host(dict(head.named_parameters()))
        self.moved = False  # whether the newest head is another one than the earlier
        self.accepted: Accepted | None = None  # of the newest head's drafts, in its last rollout,
        self.accepted_earlier: Accepted | None = None  # and of the earlier one's
        self.overlaps: list[float] = []  # of the stretch
        self.on_trial = False  # the earlier head drafts, to be compared with the newest
        self.resting_below = 0.0  # the overlap below which it is awake again; 0: it is
        self.version = 0  # the step whose updates the head that drafts has
        self.rollbacks = 0
        # Updates of a step, and the steps since that number holds. Measured over the first two that learn.
        self.share = config.share
        self.rate = 1.0
        self.measured = 0
        self.steps = 0
        self._told_not_finite = False

    # -- the rule ---------------------------------------------------------------------------------

    @property
    def updates_due(self) -> int:
        """How many updates belong to this step; replicas make as many as the tail has time for."""
        if self.on_trial:
            return 0
        rate = 1.0 if self.trainers is not None else self.rate
        rate = min(rate, 1 / RESTING_STEPS) if self.resting_below else rate
        return int((self.steps + 1) * rate) - int(self.steps * rate)

    @property
    def needs_memory(self) -> bool:
        """Whether `follow` will compute where the policy learns."""
        return self.learner is not None and self.updates_due > 0

    def _measure(self, step_seconds: float, seconds: float) -> None:
        """Fixes the rate by the second step that learned; the first one sets libraries up."""
        if self.measured < 2:
            self.measured += 1
            self.steps = 0
            if self.measured == 2:
                self.rate = updates_for(self.config.share, step_seconds, seconds)

    def _note(self, overlaps: Sequence[float]) -> None:
        """Ends a stretch whose updates brought nothing; wakes a head that has lost what it had."""
        if self.resting_below:
            if overlaps[-1] < self.resting_below:
                self.resting_below = 0.0
                self._begin_stretch()
            return
        self.overlaps += overlaps
        if len(self.overlaps) < STRETCH:
            return
        half = len(self.overlaps) // 2
        before, after = self.overlaps[:half], self.overlaps[half:]
        chance = math.sqrt(sum(statistics.variance(part) / len(part) for part in (before, after)))
        if statistics.mean(after) > statistics.mean(before) + max(RISE, chance):
            self._begin_stretch()
            return
        self.resting_below = max(1e-9, statistics.mean(after) - FALL)
        self.steps = 0
        self._try_earlier()

    def _begin_stretch(self) -> None:
        """The newest head is what the next updates are compared with."""
        if self.moved:
            self.earlier = _on_host(self.newest())
        self.moved, self.overlaps, self.steps = False, [], 0
        self.accepted_earlier = self.accepted

    # -- the judge --------------------------------------------------------------------------------

    def _judge(self, accepted: Accepted | None) -> None:
        """Looks at the drafts of the step's rollout; without any nothing is known."""
        newest = self.accepted
        if self.on_trial:
            self.on_trial = False
            if accepted is not None and newest is not None and accepted.mean >= newest.mean:
                self.rollbacks += 1
                self.warn(
                    f"the eagle head of step {self.version} drafts worse than the one before it: "
                    f"{newest.mean:.2f} tokens accepted of a draft, {accepted.mean:.2f} before; rolled back"
                )
                self._go_back()
            else:  # the policy has become harder to draft for, the head has not become worse
                self._send(self.newest())
            self.accepted_earlier = accepted or self.accepted_earlier
        elif accepted is not None:
            self.accepted = accepted
            if not self.moved:
                self.accepted_earlier = accepted
            elif self.accepted_earlier is not None and accepted.is_below(self.accepted_earlier):
                self._try_earlier()

    def _try_earlier(self) -> None:
        """Lets the earlier head draft for a rollout; what was learned is not lost meanwhile."""
        if self.moved:
            self.on_trial = True
            self._send(self.earlier)

    def _go_back(self) -> None:
        """Continues from the earlier head, which nothing says of that it drafts."""
        self.moved, self.received, self.overlaps = False, self.earlier, []
        if self.learner is not None:
            self.learner.restart(self.earlier)

    def newest(self) -> dict[str, torch.Tensor]:
        """Returns the weights that updates have come to."""
        return self.learner.weights() if self.learner is not None else self.received

    def _send(self, weights: Mapping[str, torch.Tensor]) -> None:
        if self.drafting is not None:
            self.drafting.publish_drafter(self.version, weights)

    # -- the order of a step ----------------------------------------------------------------------

    @contextmanager
    def while_generating(self) -> Iterator[None]:
        """Lets replicas without work train within, where the head is due."""
        if self.trainers is None or not self.updates_due:
            yield
            return
        self.trainers.begin_rollout()
        try:
            yield
        finally:
            self.trainers.end_rollout()

    def expect(self, groups: Sequence[Group]) -> None:
        """Called with the responses that the policy is about to learn from: requests states along them."""
        if self.learner is not None:
            tokens = SPREAD * self.updates_due * self.learner.slicing.update_rows
            self.tap.choose(longest_texts(groups, tokens, self.room))

    def follow(self, step: int, accepted: Accepted | None, step_seconds: float) -> dict[str, float]:
        """Learns after the policy's update, or receives what was learned; publishes it; returns metrics.

        `accepted` is what the step's rollout accepted of the head's drafts, `step_seconds` what it took.
        """
        began = time.perf_counter()
        due = self.updates_due
        self._judge(accepted)
        learned = self._learned(step, step_seconds, due) if due else Learned()
        self.steps += 1
        if learned.weights and not self._publish(step, learned):
            learned = Learned()
        seconds = time.perf_counter() - began
        if learned.updates and self.learner is not None:
            self._measure(step_seconds, seconds)
        metrics = {
            "drafter/updates": float(learned.updates),
            "drafter/tokens": learned.tokens,
            "time/drafter_rate": self.rate,
            "drafter/resting": float(self.resting_below > 0),
            "drafter/version": float(self.version),
            "drafter/rollbacks": float(self.rollbacks),
            "time/drafter_idle": learned.seconds,
            "time/drafter_displaced": learned.waited + seconds,
        }
        if learned.overlaps:
            metrics["drafter/overlap"] = statistics.mean(learned.overlaps)
        if self.trainers is not None:
            metrics["drafter/trainers"] = float(learned.replicas)
        return metrics

    def _learned(self, step: int, step_seconds: float, updates: int) -> Learned:
        if self.trainers is not None:
            learned = self.trainers.take(self.config.share * step_seconds)
            return learned if learned is not None and not self.on_trial else Learned()
        assert self.learner is not None
        examples = self.tap.take()
        if self.on_trial:
            return Learned()
        self.learner.plan(str(step), examples, updates)
        reports = list(self.learner.learn())
        return Learned(
            self.learner.weights() if reports else {},
            [report.mean_overlap for report in reports],
            len(reports),
            sum(report.tokens for report in reports),
            finite=all(math.isfinite(report.grad_norm + report.mean_overlap) for report in reports),
        )

    def _publish(self, step: int, learned: Learned) -> bool:
        """Publishes what was learned, and returns True; a head that is not finite never drafts."""
        self.version = step
        if learned.finite and all(bool(tensor.isfinite().all()) for tensor in learned.weights.values()):
            self.moved = True
            if self.learner is None:
                self.received = learned.weights
            self._send(learned.weights)
            self._note(learned.overlaps)
            return True
        if not self._told_not_finite:
            self._told_not_finite = True
            self.warn(
                "the eagle head's gradients are not finite: it continues from an earlier version; lower "
                f"rollout.speculation.online.lr = {self.config.lr:g}"
            )
        self._go_back()
        self._send(self.earlier)
        return False

    # -- checkpoints ------------------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the weights that draft, on the host."""
        return _on_host(self.earlier if self.on_trial else self.newest())

    def state(self) -> dict[str, torch.Tensor]:
        """Returns everything that a resumed run continues from; before the first update only counters."""
        counters = {name: float(getattr(self, name)) for name in COUNTERS}
        for name in ("accepted", "accepted_earlier"):
            measured = getattr(self, name)
            if measured is not None:
                counters |= {f"{name}.{key}": float(value) for key, value in asdict(measured).items()}
        tensors = {f"counter.{name}": torch.tensor(x, dtype=torch.float64) for name, x in counters.items()}
        tensors["overlaps"] = torch.tensor(self.overlaps, dtype=torch.float64)
        if self.version:
            learned = {f"mean.{name}": tensor for name, tensor in self.received.items()}
            tensors |= self.learner.state() if self.learner is not None else learned
        if self.moved:
            tensors |= {f"earlier.{name}": tensor for name, tensor in self.earlier.items()}
        return {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores what `state` returned, wherever the head learned then, and publishes the head.

        `tensors` are all of a checkpoint's drafters: one without a state has at least the head that drafted.
        """
        own = _below(tensors, PREFIX)
        mean = _below(own, "mean.")
        drafted = {name: x for name, x in _below(tensors, "eagle.").items() if name in self.earlier}
        if mean or drafted.keys() == self.earlier.keys():
            self.earlier = self.received = mean or drafted
        if self.learner is not None:
            self.learner.load_state(own if mean else {f"mean.{name}": x for name, x in self.received.items()})
        counters = {name: tensor.item() for name, tensor in _below(own, "counter.").items()}
        if not counters:
            return
        for name in COUNTERS:
            setattr(self, name, type(getattr(self, name))(counters[name]))
        if self.share != self.config.share:  # the run was resumed with another one
            self.share, self.measured, self.rate = self.config.share, 0, 1.0
        for name in ("accepted", "accepted_earlier"):
            found = _below(counters, f"{name}.")
            setattr(self, name, Accepted(**found) if found else None)
        self.overlaps = own["overlaps"].tolist()
        self.earlier = _below(own, "earlier.") or _on_host(self.newest())
        if self.version:
            self._send(self.earlier if self.on_trial else self.newest())


def updates_for(share: float, step_seconds: float, update_seconds: float) -> float:
    """Returns how many updates a step's share pays for."""
    return share * step_seconds / max(1e-9, update_seconds)


def _on_host(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}


def _below(tensors: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
