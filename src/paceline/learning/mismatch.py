"""The mismatch between the policy that sampled and the learner's, measured at every step.

It is taken before the weights move, so that it shows the mismatch and not the update. It adds up over
micro-batches: all fields are sums, except the largest difference.
"""

import math
from collections.abc import Callable, Iterable, Sequence
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
        return (0.0 - self.log_ratio) / max(1.0, self.tokens)


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
    by_version: dict[int, VersionMismatch] = field(default_factory=dict)  # as far as versions are known

    @classmethod
    def of(cls, values: Sequence[float], versions: Sequence[int] = ()) -> "Mismatch":
        sums, told = values[: len(SUMS)], values[len(SUMS) :]
        by_version = {v: VersionMismatch(*told[3 * i : 3 * i + 3]) for i, v in enumerate(versions)}
        return cls(*sums, by_version=by_version)

    def __add__(self, other: "Mismatch") -> "Mismatch":
        sums = {name: getattr(self, name) + getattr(other, name) for name in SUMS}
        largest = max(self.largest_probability_difference, other.largest_probability_difference)
        versions = {
            version: self.by_version.get(version, VersionMismatch())
            + other.by_version.get(version, VersionMismatch())
            for version in sorted({*self.by_version, *other.by_version})
        }
        return Mismatch(**sums | {"largest_probability_difference": largest}, by_version=versions)

    @property
    def finite(self) -> bool:
        return self.not_finite == 0

    @property
    def kl(self) -> float:
        """Returns E[-delta], the plain estimate of KL(rollout, learner)."""
        return (0.0 - self.log_ratio) / max(1.0, self.tokens)

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


# What is summed over all versions, in the order of `mismatch_values`.
SUMS = tuple(f.name for f in fields(Mismatch) if f.name != "by_version")

# Called with the mismatch of a step before the weights move; an error stops the update.
MismatchCheck = Callable[[Mismatch], None]


def mismatch_values(
    batch: MicroBatch, correction: Correction, learner_logprobs_R: torch.Tensor, weighted: bool
) -> torch.Tensor:
    """Measures a micro-batch, given as it was before its correction, without waiting for a GPU.

    Returns the fields of `Mismatch` in their order, float64 on the batch's device; `Mismatch.of` takes them.
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
    zero = delta_R.new_zeros(())
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
        "routed": zero if batch.replay is None else batch.replay.routed,
        "rerouted": zero if batch.replay is None else batch.replay.rerouted,
        "largest_probability_difference": torch.where(mask_R, difference_R, 0.0).max()
        if len(mask_R)
        else zero,
    }
    ordered = [values[name] for name in SUMS]
    ordered += _version_values(batch, delta_R, values)
    return torch.stack([value.double().to(delta_R.device) for value in ordered])


def _version_values(
    batch: MicroBatch, delta_R: torch.Tensor, values: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the sums of `VersionMismatch` for each of the batch's versions, one after the other."""
    if batch.versions_R is None:
        return [values["tokens"], values["log_ratio"], values["k3"]] * len(batch.versions)
    k3_R = k3(delta_R)
    sums = []
    for version in batch.versions:
        own_R = batch.mask_R & (batch.versions_R == version)
        sums += [own_R.sum(), torch.where(own_R, delta_R, 0.0).sum(), torch.where(own_R, k3_R, 0.0).sum()]
    return sums


def sum_mismatches(parts: Iterable[Mismatch]) -> Mismatch:
    return sum(parts, start=Mismatch())
