"""What an update did, summed over micro-batches and optimiser steps, as metrics (docs/metrics.md)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MicroBatchSums:
    """Sums over the loss tokens of a micro-batch; `loss` is already weighed for its optimiser step."""

    loss: float
    tokens: int
    entropy: float
    clipped: float
    reference_kl: float
    approximate_kl: float
    largest_delta: float


@dataclass
class UpdateTotals:
    micro_batches: list[MicroBatchSums] = field(default_factory=list)
    updates: int = 0
    skipped_updates: int = 0
    learning_rate: float = 0.0
    gradient_norms: list[float] = field(default_factory=list)
    halvings: int = 0
    rollout_reference_kl: float = 0.0  # where the KL is in the reward: of the policy that sampled

    def add_update(self, sums: Sequence[MicroBatchSums], gradient_norm: float, learning_rate: float) -> None:
        self.micro_batches += sums
        self.updates += 1
        self.skipped_updates += not math.isfinite(gradient_norm)
        self.gradient_norms.append(gradient_norm)
        self.learning_rate = learning_rate

    def add_skipped_update(self, learning_rate: float) -> None:
        self.updates += 1
        self.skipped_updates += 1
        self.learning_rate = learning_rate

    def add_log_ratios(self, sequences: Iterable[tuple[Sequence[float], Sequence[bool]]]) -> None:
        """Keeps the mean k3 estimate over loss tokens; the ratios are log pi_rollout - log pi_reference."""
        counted = [x for ratios, mask in sequences for x, sampled in zip(ratios, mask, strict=True) if sampled]
        self.rollout_reference_kl = sum(math.exp(min(20.0, -x)) - 1 + x for x in counted) / max(1, len(counted))

    def metrics(self) -> dict[str, float]:
        tokens = max(1, sum(sums.tokens for sums in self.micro_batches))

        def mean(name: str) -> float:
            return sum(getattr(sums, name) for sums in self.micro_batches) / tokens

        return {
            "policy/skipped": float(self.skipped_updates == self.updates),
            "policy/loss": sum(sums.loss for sums in self.micro_batches) / max(1, self.updates),
            "policy/entropy": mean("entropy"),
            "policy/clip_fraction": mean("clipped"),
            "policy/approximate_kl": mean("approximate_kl"),
            "policy/reference_kl": mean("reference_kl") + self.rollout_reference_kl,
            "policy/largest_logprob_delta": max((sums.largest_delta for sums in self.micro_batches), default=0.0),
            "policy/gradient_norm": sum(self.gradient_norms) / max(1, len(self.gradient_norms)),
            "policy/learning_rate": self.learning_rate,
            "memory/micro_batch_halvings": float(self.halvings),
        }
