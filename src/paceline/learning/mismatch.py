"""The mismatch between the policy that sampled and the learner's, measured at every step.

It is taken before the weights move, so that it shows the mismatch and not the update. It adds up over
micro-batches: all fields are sums, except the largest difference.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

import torch

from paceline.learning.batch import MicroBatch
from paceline.learning.correction import Correction, k3, ratio
from paceline.learning.logprobs import MAX_LOG_RATIO


@dataclass(frozen=True)
class VersionMismatch:
    """The sums over the tokens that one version of the weights sampled."""

    tokens: float = 0.0
    log_ratio: float = 0.0
    k3: float = 0.0

    def __add__(self, other: "VersionMismatch") -> "VersionMismatch":
        return VersionMismatch(
            self.tokens + other.tokens, self.log_ratio + other.log_ratio, self.k3 + other.k3
        )

    @property
    def kl(self) -> float:
        """Returns E[-delta] over these tokens."""
        return -self.log_ratio / max(1.0, self.tokens)


@dataclass(frozen=True)
class Mismatch:
    """Sums over sampled tokens and the responses that have any; delta and rho are those of correction.py."""

    tokens: float = 0.0
    sequences: float = 0.0
    not_finite: float = 0.0  # tokens without a usable logprob, in rollout or learner
    log_ratio: float = 0.0
    k3: float = 0.0
    squared_ratio: float = 0.0
    squared_sequence_ratio: float = 0.0
    log_perplexity_ratio: float = 0.0
    token_weight: float = 0.0
    sequence_weight: float = 0.0
    effective_weight: float = 0.0
    squared_effective_weight: float = 0.0
    clipped: float = 0.0
    masked: float = 0.0
    rejected_tokens: float = 0.0
    rejected_sequences: float = 0.0
    routed: float = 0.0  # (token, MoE layer) pairs whose routing was replayed
    rerouted: float = 0.0  # of these, where the learner's router would have chosen other experts
    largest_probability_difference: float = 0.0
    by_version: dict[int, VersionMismatch] = field(default_factory=dict)  # as far as versions are told

    def __add__(self, other: "Mismatch") -> "Mismatch":
        names = [f.name for f in fields(self) if f.name != "by_version"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        largest = max(self.largest_probability_difference, other.largest_probability_difference)
        versions = {
            version: self.by_version.get(version, VersionMismatch())
            + other.by_version.get(version, VersionMismatch())
            for version in sorted({*self.by_version, *other.by_version})
        }
        return Mismatch(**sums | {"largest_probability_difference": largest}, by_version=versions)

    @property
    def finite(self) -> bool:
        """Returns whether every token has a usable logprob on both sides."""
        return self.not_finite == 0

    @property
    def kl(self) -> float:
        """Returns E[-delta], the plain estimate of KL(rollout, learner)."""
        return -self.log_ratio / max(1.0, self.tokens)

    @property
    def newest_kl(self) -> float:
        """Returns the KL of the tokens that the newest weights sampled: what is not due to age."""
        told = [sums for sums in self.by_version.values() if sums.tokens]
        return told[-1].kl if told else self.kl

    def lag_metrics(self, version: int) -> dict[str, float]:
        """Returns the mismatch by how many versions a token is behind `version`; nothing if none is."""
        told = {version - sampled: sums for sampled, sums in self.by_version.items() if sums.tokens}
        if not any(told):
            return {}
        return {
            name: value
            for lag, sums in sorted(told.items())
            for name, value in (
                (f"mismatch/lag_{lag}/kl", sums.kl),
                (f"mismatch/lag_{lag}/k3", sums.k3 / sums.tokens),
                (f"mismatch/lag_{lag}/tokens", sums.tokens / max(1.0, self.tokens)),
            )
        }

    def metrics(self) -> dict[str, float]:
        """Returns the means under their `mismatch/` and `correction/` names (docs/metrics.md)."""
        tokens = max(1.0, self.tokens)
        sequences = max(1.0, self.sequences)
        squared = self.squared_effective_weight
        return {
            "mismatch/kl": self.kl,
            "mismatch/k3": self.k3 / tokens,
            "mismatch/chi2_token": self.squared_ratio / tokens - 1,
            "mismatch/chi2_sequence": self.squared_sequence_ratio / sequences - 1,
            "mismatch/perplexity_ratio": math.exp(
                min(max(self.log_perplexity_ratio / sequences, -MAX_LOG_RATIO), MAX_LOG_RATIO)
            ),
            "mismatch/largest_probability_difference": self.largest_probability_difference,
            **({"mismatch/rerouted": self.rerouted / self.routed} if self.routed else {}),
            "correction/ess": self.effective_weight**2 / (tokens * squared) if squared else 0.0,
            "correction/weight_mean": self.token_weight / tokens,
            "correction/clipped": self.clipped / tokens,
            "correction/masked": self.masked / tokens,
            "correction/rejected_sequences": self.rejected_sequences / sequences,
        }


# Is shown the mismatch of a step before the weights move; what it raises stops the update.
MismatchCheck = Callable[[Mismatch], None]


def measure_mismatch(
    batch: MicroBatch, correction: Correction, learner_logprobs_R: torch.Tensor, weighted: bool
) -> Mismatch:
    """Measures a micro-batch, given as it was before its correction.

    With `weighted` the effective sample size is that of the recipe's weights, else that of the ratios.
    """
    mask_R = batch.mask_R
    delta_R = correction.delta_R
    rho_R = ratio(delta_R)
    tokens_B = batch.sequence_sums(mask_R.double())
    some_B = tokens_B > 0
    effective_R = torch.where(correction.kept_R, correction.weights_R if weighted else rho_R, 0.0)
    difference_R = (learner_logprobs_R.detach().double().exp() - batch.rollout_logprobs_R.exp()).abs()
    weight_B = batch.sequence_sums(torch.where(mask_R, correction.weights_R, 0.0)) / tokens_B.clamp(min=1)
    kept_B = batch.sequence_sums(correction.kept_R.double())
    values = {
        "tokens": mask_R.sum(),
        "sequences": some_B.sum(),
        "not_finite": (~delta_R.isfinite()).sum(),
        "log_ratio": delta_R.sum(),
        "k3": k3(delta_R).sum(),
        "squared_ratio": torch.where(mask_R, rho_R**2, 0.0).sum(),
        "squared_sequence_ratio": torch.where(some_B, ratio(batch.sequence_sums(delta_R)) ** 2, 0.0).sum(),
        "log_perplexity_ratio": -(batch.sequence_sums(delta_R) / tokens_B.clamp(min=1)).sum(),
        "token_weight": torch.where(mask_R, correction.weights_R, 0.0).sum(),
        "sequence_weight": weight_B.sum(),
        "effective_weight": effective_R.sum(),
        "squared_effective_weight": (effective_R**2).sum(),
        "clipped": correction.clipped_R.sum(),
        "masked": (mask_R & ~correction.counted_R).sum(),
        "rejected_tokens": (mask_R & ~correction.kept_R).sum(),
        "rejected_sequences": (some_B & (kept_B == 0)).sum(),
        "routed": torch.zeros(()) if batch.replay is None else batch.replay.routed,
        "rerouted": torch.zeros(()) if batch.replay is None else batch.replay.rerouted,
        "largest_probability_difference": torch.where(mask_R, difference_R, 0.0).max()
        if len(mask_R)
        else torch.zeros(()),
    }
    stacked = torch.stack([value.double().to(delta_R.device) for value in values.values()])
    numbers = stacked.tolist()  # one transfer from the GPU
    sums = dict(zip(values, numbers, strict=True))
    return Mismatch(**sums, by_version=_by_version(batch, delta_R, sums))


def _by_version(
    batch: MicroBatch, delta_R: torch.Tensor, sums: dict[str, float]
) -> dict[int, VersionMismatch]:
    if batch.versions_R is None:
        whole = VersionMismatch(sums["tokens"], sums["log_ratio"], sums["k3"])
        return dict.fromkeys(batch.versions, whole)
    k3_R = k3(delta_R)
    rows = []
    for version in batch.versions:
        own_R = batch.mask_R & (batch.versions_R == version)
        rows.append(torch.stack([own_R.sum(), delta_R[own_R].sum(), k3_R[own_R].sum()]))
    return {
        version: VersionMismatch(*row)
        for version, row in zip(batch.versions, torch.stack(rows).tolist(), strict=True)
    }


def sum_mismatches(parts: Iterable[Mismatch]) -> Mismatch:
    """Adds up the mismatch of several micro-batches."""
    return sum(parts, start=Mismatch())
