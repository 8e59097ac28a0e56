"""The contract between the loop and whatever generates its completions.

    submit(requests) ──▶ completions() yields each one as it finishes ──▶ update_weights(version) ──▶ submit ...

More requests may be submitted while completions are being read. `pause` makes `completions` return early with the rest
outstanding; after `resume` it goes on, under new weights if there were any: the completion then has a segment per
version. Noise depends on seed and absolute position only, so a sequence is continued by a request with the same seed
whose prompt is everything so far, and a request that is run again anywhere gives the same tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from paceline.pacing.strategy import Observation, Pacer
from paceline.pacing.trace import TraceRow
from paceline.policy.attention import AttentionObserver
from paceline.types import Completion, Request

BASE_PRECISION = "bf16"  # the recipe's name for rollouts in the policy's own type, whichever that is


@dataclass
class RolloutStats:
    """What one rollout did, since the last `take_stats`; one entry per decode step makes the long tail visible."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    running: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    strategies: list[str] = field(default_factory=list)  # how each step ran: `plain`, or drafter and length such as `history:5`
    draft_seconds: float = 0.0  # of all decode steps; what is not drafting is verifying, or plain decoding
    verify_seconds: float = 0.0
    drafts: dict[str, "DraftStats"] = field(default_factory=dict)  # by drafter
    precision: "PrecisionStats | None" = None  # None: the policy's own
    trace: list[TraceRow] = field(default_factory=list)  # what was decided, and what came of it
    graph_pool_bytes: int | None = None  # that captured steps hold of a GPU; None: nothing is captured here

    def note(self, observation: Observation) -> None:
        """One step, as its outcome is read."""
        strategy = observation.decision.strategy
        self.running.append(observation.running)
        self.strategies.append(str(strategy))
        self.draft_seconds += observation.draft_seconds
        self.verify_seconds += observation.verify_seconds
        if strategy.count:
            self.drafts.setdefault(strategy.drafter, DraftStats()).note(observation)
        if not self.trace or self.trace[-1].decision is not observation.decision:
            self.trace.append(TraceRow(observation.decision))
        self.trace[-1].note(observation)


@dataclass(frozen=True)
class PrecisionStats:
    """A rollout below the policy's own precision."""

    precision: str
    quantise_seconds: float  # the last weight update's
    kv_error: float  # of attention with the FP8 cache, relative, in the worst layer at the last calibration
    kv_base_layers: int  # whose keys and values went back to the policy's own type


@dataclass
class DraftStats:
    """What verification said of one drafter's proposals. A draft is one row's proposal in one step, an empty one included."""

    drafts: int = 0
    proposed: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)  # drafts whose first i + 1 tokens were all accepted

    @property
    def accept_length(self) -> float:
        """Tokens emitted per draft, the policy's own token included."""
        return 1.0 + self.accepted / max(1, self.drafts)

    @property
    def first_accepted(self) -> float:
        """The share of drafts whose first token was."""
        return self.accepted_at[0] / self.drafts if self.drafts else 0.0

    def note(self, observation: Observation) -> None:
        self.drafts += observation.drafts
        self.proposed += observation.proposed
        self.accepted += sum(observation.accepted_at)
        self.accepted_at += [0] * (observation.decision.strategy.count - len(self.accepted_at))
        for i, accepted in enumerate(observation.accepted_at):
            self.accepted_at[i] += accepted


class WeightsNotFinite(RuntimeError):
    """The policy's weights cannot be brought into the rollout's precision; the message says which."""


class Backend(Protocol):
    pacer: Pacer | None  # who chooses its strategies; None: nobody has to

    @property
    def precision(self) -> str:
        """What completions are computed in now, as the recipe names it; anything but `BASE_PRECISION` can be fallen back from."""

    def submit(self, requests: Sequence[Request]) -> None: ...

    def completions(self) -> Iterator[Completion]: ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests with `FinishReason.ABORTED`; they are still yielded, with what they have."""

    def update_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        """`weights` under Hugging Face names; None where the learner wrote into the storage this backend reads.

        A backend that converts them raises `WeightsNotFinite` where it cannot."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def sleep(self) -> None:
        """Gives cache memory back; only while nothing is outstanding."""

    def wake(self) -> None: ...

    def training(self) -> AbstractContextManager[None]:
        """Within, somebody trains on the same device: nothing is done that this would disturb, such as capturing a graph."""

    def take_stats(self) -> RolloutStats: ...

    @property
    def attention_observer(self) -> AttentionObserver | None:
        """For the learner's forward passes, where this backend calibrates with what they compute."""

    @property
    def trainable_head(self) -> nn.Module | None:
        """A drafter's, for whoever trains it: where it lies is where proposals are computed from."""

    def drafter_state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must keep beside the policy: what drafters have learned, and KV scales; empty where there is nothing."""

    def load_drafter_state(self, tensors: dict[str, torch.Tensor]) -> None: ...

    def fall_back_to_base_precision(self) -> None:
        """From now on `BASE_PRECISION`, with the weights of the current version. Only while nothing is outstanding."""

    def close(self) -> None: ...
