"""Sums over the micro-batches and optimiser steps of an update, and the metrics made of them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import torch

from paceline.learning.algorithms.base import TokenLoss
from paceline.learning.batch import MicroBatch
from paceline.learning.correction import Correction, k3
from paceline.learning.mismatch import Mismatch


@dataclass(frozen=True)
class MicroBatchSums:
    """Sums over the loss tokens of a micro-batch."""

    loss: float  # weighted for its optimiser step as if nothing were rejected
    tokens: float
    entropy: float
    clipped: float
    reference_kl: float
    approximate_kl: float
    largest_delta: float
    signal: float  # magnitudes of the advantages
    lost: float  # of them, what clipping, bounds and rejection took
    mismatch: Mismatch  # of the policy as it was in this forward pass

    @classmethod
    def of(cls, values: Sequence[float], versions: Sequence[int]) -> "MicroBatchSums":
        """Returns sums from numbers in the fields' order, those of the mismatch last and side by side.

        `versions` are those of the weights that sampled the micro-batch.
        """
        own = len(fields(cls)) - 1
        return cls(*values[:own], Mismatch.of(values[own:], versions))


def micro_batch_values(
    batch: MicroBatch,
    corrected_batch: MicroBatch,
    correction: Correction,
    loss: torch.Tensor,
    logprobs_R: torch.Tensor,
    entropies_R: torch.Tensor,
    token_loss: TokenLoss,
) -> torch.Tensor:
    """Returns the fields of `MicroBatchSums` before the mismatch, in their order, float64 on the device."""
    mask_R = batch.mask_R
    zero = logprobs_R.new_zeros(())
    delta_R = torch.where(mask_R, logprobs_R.detach() - batch.rollout_logprobs_R, zero)

    def over_loss(values_R: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_R, values_R, torch.zeros_like(values_R)).sum()

    signal_R = batch.advantages_R.abs().double()
    lost_R = torch.where(token_loss.clipped_R & corrected_batch.mask_R, 1.0, correction.lost_R)
    values = (
        loss.detach(),
        mask_R.sum(),
        over_loss(entropies_R),
        (token_loss.clipped_R & corrected_batch.mask_R).sum(),
        over_loss(token_loss.reference_kl_R),
        k3(delta_R).sum(),
        delta_R.abs().max() if len(delta_R) else zero,
        over_loss(signal_R),
        over_loss(signal_R * lost_R),
    )
    return torch.stack([value.double() for value in values])


@dataclass
class UpdateTotals:
    """What the update of one RL step did; the learner adds to it as it goes."""

    micro_batches: list[MicroBatchSums] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # one per optimiser step
    mismatch: Mismatch | None = None  # before the weights moved; None: not known yet
    lost_signal: float = 0.0  # of the first optimiser step: its share of the advantages
    updates: int = 0
    skipped_updates: int = 0
    masked_updates: int = 0
    nonfinite_updates: int = 0
    learning_rate: float = 0.0
    gradient_norms: list[float] = field(default_factory=list)
    halvings: int = 0
    idle_tokens: int = 0  # in the loss, but not passed through the policy: their advantages are zero
    rollout_reference_kl: float = 0.0  # where the KL is in the reward: of the policy that sampled

    def add_update(
        self, sums: Sequence[MicroBatchSums], scale: float, gradient_norm: float, learning_rate: float
    ) -> None:
        """Adds an optimiser step whose gradients were multiplied by `scale`.

        Where the gradient norm is not finite, the step left the weights alone.
        """
        if not self.updates:
            self.lost_signal = sum(s.lost for s in sums) / max(1e-30, sum(s.signal for s in sums))
        self.micro_batches += sums
        self.losses.append(scale * sum(s.loss for s in sums))
        self.updates += 1
        self.skipped_updates += not math.isfinite(gradient_norm)
        self.nonfinite_updates += not math.isfinite(gradient_norm)
        self.gradient_norms.append(gradient_norm)
        self.learning_rate = learning_rate

    def add_masked_update(self, sums: Sequence[MicroBatchSums], learning_rate: float) -> None:
        """Adds an update that was skipped because the correction left no token to learn from."""
        self.micro_batches += sums
        self.masked_updates += 1
        self.add_skipped_update(learning_rate)

    def add_skipped_update(self, learning_rate: float) -> None:
        """Adds an update that was skipped because it had no tokens in the loss."""
        self.updates += 1
        self.skipped_updates += 1
        self.learning_rate = learning_rate

    def add_log_ratios(self, sequences: Iterable[tuple[Sequence[float], Sequence[bool]]]) -> None:
        """Keeps the mean k3 estimate over loss tokens; the ratios are log pi_rollout - log pi_reference."""
        counted = [
            x for ratios, mask in sequences for x, sampled in zip(ratios, mask, strict=True) if sampled
        ]
        total = float(k3(-torch.tensor(counted, dtype=torch.float64)).sum())
        self.rollout_reference_kl = total / max(1, len(counted))

    def metrics(self) -> dict[str, float]:
        tokens = max(1, sum(sums.tokens for sums in self.micro_batches))

        def mean(name: str, over: float = tokens) -> float:
            return sum(getattr(sums, name) for sums in self.micro_batches) / over

        return {
            "policy/skipped": float(self.skipped_updates == self.updates),
            "policy/masked_updates": float(self.masked_updates),
            "policy/nonfinite_updates": float(self.nonfinite_updates),
            "policy/loss": sum(self.losses) / max(1, self.updates),
            "policy/entropy": mean("entropy"),
            "policy/clip_fraction": mean("clipped", tokens + self.idle_tokens),
            "policy/approximate_kl": mean("approximate_kl"),
            "policy/reference_kl": mean("reference_kl") + self.rollout_reference_kl,
            "policy/largest_logprob_delta": max(
                (sums.largest_delta for sums in self.micro_batches), default=0.0
            ),
            "policy/gradient_norm": sum(self.gradient_norms) / max(1, len(self.gradient_norms)),
            "policy/learning_rate": self.learning_rate,
            "policy/lost_signal": self.lost_signal,
            "policy/zero_advantage_share": self.idle_tokens / max(1, self.idle_tokens + tokens),
            "memory/micro_batch_halvings": float(self.halvings),
            **self.mismatch_metrics(),
        }

    def mismatch_metrics(self) -> dict[str, float]:
        return {} if self.mismatch is None else self.mismatch.metrics()
