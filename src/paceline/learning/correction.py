"""Rollout correction: learning from samples of a slightly different policy (sources: docs/precision.md).

Rollouts in low precision, by other kernels or under older weights come from a policy pi_rollout that is not
the learner's own pi_old. Per response token, and for a whole response y of n sampled tokens:

    delta_t = log pi_old(y_t) - log pi_rollout(y_t)         both at the temperature that was sampled with
    rho_t   = exp(clamp(delta_t, -20, 20))
    rho_y   = exp(clamp(sum of delta_t, -20, 20))

    weight      w = rho_t or rho_y; outside [lo, hi] truncated to the nearest bound (TIS) or 0 (IcePop)
    reject      left out of the loss and its mean: tokens with rho_t, or responses with rho_y,
                exp(mean delta_t) or mean (rho_t - 1 - delta_t), outside [lo, hi]
    veto        left out, too: responses with any rho_t below the threshold

The objective becomes w min(r A, clip(r) A) with r = pi_theta / pi_old (decoupled PPO, arXiv 2110.00641); w
has no gradient. In bypass mode there are no weights: r = pi_theta / pi_rollout is the correction, and what is
rejected is judged by pi_theta.

Only tokens that the policy sampled count. Everything is float64, whatever the policy is.
"""

from dataclasses import dataclass, replace

import torch

from paceline.config import CorrectionConfig
from paceline.learning.batch import MicroBatch
from paceline.learning.logprobs import MAX_LOG_RATIO


@dataclass(frozen=True)
class Correction:
    """Weights and rejections of the response tokens of a micro-batch, without gradients."""

    delta_R: torch.Tensor  # 0 outside the loss
    weights_R: torch.Tensor  # 1 where the recipe has no weights; not yet normalised
    clipped_R: torch.Tensor  # loss tokens whose weight was truncated
    kept_R: torch.Tensor  # loss tokens that were not rejected
    lost_R: torch.Tensor  # the share of a loss token's weight that bounds and rejection took

    @property
    def counted_R(self) -> torch.Tensor:
        """Returns the loss tokens that are left with any weight."""
        return self.kept_R & (self.weights_R > 0)


def compute_correction(
    config: CorrectionConfig, batch: MicroBatch, learner_logprobs_R: torch.Tensor
) -> Correction:
    delta_R = torch.where(batch.mask_R, learner_logprobs_R.detach().double() - batch.rollout_logprobs_R, 0.0)
    weights_R, clipped_R, lost_R = _weights(config, batch, delta_R)
    kept_R = batch.mask_R & ~_rejected(config, batch, delta_R)
    lost_R = torch.where(kept_R, lost_R, batch.mask_R.double())
    return Correction(delta_R, weights_R, clipped_R & batch.mask_R, kept_R, lost_R)


def apply_correction(
    config: CorrectionConfig,
    batch: MicroBatch,
    correction: Correction,
    learner_logprobs_R: torch.Tensor,
    mean_weight: float,
) -> MicroBatch:
    """Returns the corrected micro-batch for the algorithm.

    Weights go into the advantages: being >= 0, they pass through the clipped minimum unchanged.
    """
    old_R = learner_logprobs_R.detach() if config.mode == "decoupled" else batch.rollout_logprobs_R
    advantages_R = batch.advantages_R * correction.weights_R / mean_weight
    return replace(batch, mask_R=correction.kept_R, advantages_R=advantages_R, old_logprobs_R=old_R)


def k3(delta_R: torch.Tensor) -> torch.Tensor:
    """Returns exp(delta) - 1 - delta (Schulman 2020), an estimate of KL(rollout, learner), never negative."""
    clamped_R = delta_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return clamped_R.exp() - 1 - clamped_R


def ratio(delta: torch.Tensor) -> torch.Tensor:
    return delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _weights(
    config: CorrectionConfig, batch: MicroBatch, delta_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns weights, which of them were truncated, and the share of each that its bounds took."""
    if config.weight == "none":
        return torch.ones_like(delta_R), torch.zeros_like(batch.mask_R), torch.zeros_like(delta_R)
    raw_R = (
        ratio(delta_R) if config.weight == "token" else ratio(batch.sequence_sums(delta_R))[batch.sequence_R]
    )
    low, high = config.weight_bounds
    outside_R = (raw_R < low) | (raw_R > high)
    if config.weight_outside == "zero":
        return torch.where(outside_R, 0.0, raw_R), torch.zeros_like(batch.mask_R), outside_R.double()
    return raw_R.clamp(low, high), outside_R, (1 - high / raw_R).clamp(min=0.0)


def _rejected(config: CorrectionConfig, batch: MicroBatch, delta_R: torch.Tensor) -> torch.Tensor:
    rejected_R = torch.zeros_like(batch.mask_R)
    if config.reject != "none":
        statistic_R = _statistic(config.reject, batch, delta_R)
        low, high = config.reject_bounds
        rejected_R = (statistic_R < low) | (statistic_R > high)
    if config.veto > 0:
        vetoed_B = batch.sequence_sums((ratio(delta_R) < config.veto).double()) > 0
        rejected_R = rejected_R | vetoed_B[batch.sequence_R]
    return rejected_R


def _statistic(reject: str, batch: MicroBatch, delta_R: torch.Tensor) -> torch.Tensor:
    """Returns the number that is compared with the bounds, at every token.

    Outside the loss delta is 0, so the ratio is 1 and k3 is 0.
    """
    if reject == "token":
        return ratio(delta_R)
    if reject == "sequence":
        return ratio(batch.sequence_sums(delta_R))[batch.sequence_R]
    tokens_B = batch.sequence_sums(batch.mask_R.double()).clamp(min=1)
    if reject == "geometric":
        return ratio(batch.sequence_sums(delta_R) / tokens_B)[batch.sequence_R]
    return (batch.sequence_sums(k3(delta_R)) / tokens_B)[batch.sequence_R]
