"""What an algorithm is: advantages for the samples of a step, and a loss for every response token.

The learner does the rest, the same for all: it weighs the token losses (`token_weights`), adds them up over
micro-batches and takes the optimiser step. Every number here is per step or per sequence, so nothing depends
on how a step is cut.

Suffix R: over the response tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch

from paceline.config import LearningConfig
from paceline.learning.batch import MicroBatch
from paceline.types import Group

EPSILON = 1e-6
LARGEST_LOG_RATIO = 20.0

# log pi_rollout - log pi_reference of every response token, by group and sample.
LogRatios = Sequence[Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Advantage:
    """Of one sample: `value` for every token, less the token's own penalty where there are any."""

    value: float
    penalties: tuple[float, ...] = ()


@dataclass(frozen=True)
class TokenLoss:
    """Per response token: what to minimise, and what to report."""

    loss_R: torch.Tensor
    clipped_R: torch.Tensor
    reference_kl_R: torch.Tensor


class Algorithm(Protocol):
    kl_in_reward: ClassVar[
        bool
    ]  # the KL to the reference lowers the advantages, rather than adding to the loss

    def __init__(self, config: LearningConfig) -> None: ...

    def advantages(self, groups: Sequence[Group], log_ratios: LogRatios | None) -> list[list[Advantage]]:
        """By group and sample; all values zero when the rewards say nothing. `log_ratios` only where
        `kl_in_reward`.
        """

    def token_loss(
        self, batch: MicroBatch, logprobs_R: torch.Tensor, reference_R: torch.Tensor | None
    ) -> TokenLoss: ...


def normalise(values: Sequence[float]) -> list[float]:
    """(x - mean) / (sample standard deviation + epsilon); zeros where all are equal, whatever their mean
    rounds to.
    """
    if len(set(values)) < 2:
        return [0.0] * len(values)
    centred = centre(values)
    deviation = (sum(x * x for x in centred) / (len(values) - 1)) ** 0.5
    return [x / (deviation + EPSILON) for x in centred]


def centre(values: Sequence[float]) -> list[float]:
    if len(set(values)) < 2:
        return [0.0] * len(values)
    mean = sum(values) / len(values)
    return [x - mean for x in values]


def log_ratio(batch: MicroBatch, logprobs_R: torch.Tensor) -> torch.Tensor:
    """log pi_theta - log pi_old. The old policy is the one that sampled, or in decoupled mode the learner's
    before the update.

    Held within what exp can take: an infinite ratio times the zero weight of a token that was masked would be
    NaN.
    """
    return (logprobs_R - batch.anchor_logprobs_R.to(logprobs_R.dtype)).clamp(
        -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO
    )


def clipped_surrogate(
    config: LearningConfig, ratio_R: torch.Tensor, advantages_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and where the clip took the gradient (PPO, arXiv 1707.06347,
    eq. 7).
    """
    bounded_R = ratio_R.clamp(1 - config.clip_low, 1 + config.clip_high)
    free_R, held_R = ratio_R * advantages_R, bounded_R * advantages_R
    return -torch.minimum(free_R, held_R), (free_R > held_R).detach()


def with_reference_kl(
    config: LearningConfig,
    loss_R: torch.Tensor,
    clipped_R: torch.Tensor,
    logprobs_R: torch.Tensor,
    reference_R: torch.Tensor | None,
) -> TokenLoss:
    """Adds kl_coef x the k3 estimate exp(d) - d - 1, d = log pi_ref - log pi_theta (Schulman 2020): unbiased,
    never negative.

    d is held as `log_ratio` holds its own, and for the same reason.
    """
    if reference_R is None:
        return TokenLoss(loss_R, clipped_R, torch.zeros_like(logprobs_R))
    delta_R = (reference_R - logprobs_R).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    kl_R = delta_R.exp() - delta_R - 1
    return TokenLoss(loss_R + config.kl_coef * kl_R, clipped_R, kl_R.detach())


def token_weights(
    loss_mean: Literal["token", "sequence", "constant"],
    batch: MicroBatch,
    total_tokens: int,
    total_sequences: int,
    max_tokens: int,
) -> torch.Tensor:
    """What each response token counts in its optimiser step, however that is cut into micro-batches; totals
    are the step's.

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
