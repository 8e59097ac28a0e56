"""The interface of an algorithm: advantages for the samples of a step, and a loss for every response token.

The learner does the rest, the same for all: it weights the token losses (`token_weights`), adds them up over
micro-batches and takes the optimiser step. Every number here is per step or per sequence, so nothing depends
on how a step is split into micro-batches. `algorithms/__init__.py` documents how to add an algorithm.

Suffix R: over the response tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch

from paceline.config import LearningConfig
from paceline.learning.batch import MicroBatch
from paceline.learning.logprobs import MAX_LOG_RATIO
from paceline.types import Group

# Added to the standard deviation of rewards before dividing by it.
STD_EPSILON = 1e-6

# log pi_rollout - log pi_reference of every response token, by group and sample.
LogRatios = Sequence[Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Advantage:
    """A sample's advantage: `value` for every token, less the token's own penalty where there are any."""

    value: float
    penalties: tuple[float, ...] = ()


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each response token, and what is reported about it."""

    loss_R: torch.Tensor  # to minimise
    clipped_R: torch.Tensor  # whether the clip took the gradient
    reference_kl_R: torch.Tensor  # estimate of the KL to the reference


class Algorithm(Protocol):
    """What the learner needs of an algorithm."""

    # Whether the KL to the reference lowers the advantages, rather than adding to the loss.
    kl_in_reward: ClassVar[bool]

    def __init__(self, config: LearningConfig) -> None: ...

    def advantages(self, groups: Sequence[Group], log_ratios: LogRatios | None) -> list[list[Advantage]]:
        """Returns advantages by group and sample; all values are zero where the rewards carry no signal.

        `log_ratios` are given only where `kl_in_reward` and the recipe has a KL.
        """

    def token_loss(
        self, batch: MicroBatch, logprobs_R: torch.Tensor, reference_R: torch.Tensor | None
    ) -> TokenLoss:
        """Returns the loss of each response token at the policy's current logprobs.

        `reference_R` are the reference's logprobs where the KL is in the loss, else None.
        """


def normalise(values: Sequence[float]) -> list[float]:
    """Returns (x - mean) / (sample standard deviation + epsilon), and exact zeros where all are equal."""
    if len(set(values)) < 2:
        return [0.0] * len(values)
    centred = centre(values)
    deviation = (sum(x * x for x in centred) / (len(values) - 1)) ** 0.5
    return [x / (deviation + STD_EPSILON) for x in centred]


def centre(values: Sequence[float]) -> list[float]:
    """Returns x - mean, and exact zeros where all are equal, whatever their mean rounds to."""
    if len(set(values)) < 2:
        return [0.0] * len(values)
    mean = sum(values) / len(values)
    return [x - mean for x in values]


def log_ratio(batch: MicroBatch, logprobs_R: torch.Tensor) -> torch.Tensor:
    """Returns log pi_theta - log pi_old, clamped to what exp can take, and 0 outside the loss.

    The old policy is the one that sampled, or in decoupled mode the learner's before the update. Outside the
    loss logprobs may be anything: an infinite ratio, or none, times the zero weight would be NaN.
    """
    log_ratio_R = logprobs_R - batch.old_logprobs_R.to(logprobs_R.dtype)
    return torch.where(batch.mask_R, log_ratio_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0)


def clipped_surrogate(
    config: LearningConfig, ratio_R: torch.Tensor, advantages_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns -min(r A, clip(r, 1 - low, 1 + high) A), and where the clip took the gradient.

    This is the objective of PPO (arXiv 1707.06347, eq. 7).
    """
    unclipped_R = ratio_R * advantages_R
    clipped_R = ratio_R.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_R
    return -torch.minimum(unclipped_R, clipped_R), (unclipped_R > clipped_R).detach()


def with_reference_kl(
    config: LearningConfig,
    loss_R: torch.Tensor,
    clipped_R: torch.Tensor,
    logprobs_R: torch.Tensor,
    reference_R: torch.Tensor | None,
) -> TokenLoss:
    """Adds kl_coef times the k3 estimate of the KL to the reference, where there is one.

    k3 = exp(d) - d - 1 with d = log pi_ref - log pi_theta (Schulman 2020): unbiased, never negative. d is
    clamped as in `log_ratio`, and for the same reason.
    """
    if reference_R is None:
        return TokenLoss(loss_R, clipped_R, torch.zeros_like(logprobs_R))
    delta_R = (reference_R - logprobs_R).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kl_R = delta_R.exp() - delta_R - 1
    return TokenLoss(loss_R + config.kl_coef * kl_R, clipped_R, kl_R.detach())


def token_weights(
    loss_mean: Literal["token", "sequence", "constant"],
    batch: MicroBatch,
    total_tokens: int,
    total_sequences: int,
    max_tokens: int,
) -> torch.Tensor:
    """Returns the weight of each response token in its optimiser step; totals are the step's.

    token     1 / total tokens                              DAPO (arXiv 2503.14476, eq. 8)
    sequence  1 / (response's tokens x total sequences)     GRPO (arXiv 2402.03300, eq. 3), GSPO
    constant  1 / (max_tokens x total sequences)            Dr. GRPO (arXiv 2503.20783, section 3.2)
    """
    mask_R = batch.mask_R.double()
    if loss_mean == "token":
        return mask_R / total_tokens
    if loss_mean == "constant":
        return mask_R / (max_tokens * total_sequences)
    return mask_R / batch.sequence_sums(mask_R).clamp(min=1)[batch.sequence_R] / total_sequences
