"""The GRPO objective (arXiv 2402.03300): clipped policy gradient with an optional KL to a reference."""

from dataclasses import dataclass

import torch

from paceline.config import LearningConfig
from paceline.learning.batch import MicroBatch


@dataclass(frozen=True)
class TokenLoss:
    """Per response token: what to minimise, and what to report."""

    loss_R: torch.Tensor
    clipped_R: torch.Tensor
    reference_kl_R: torch.Tensor


def grpo_loss(
    config: LearningConfig, batch: MicroBatch, logprobs_R: torch.Tensor, reference_logprobs_R: torch.Tensor | None
) -> TokenLoss:
    advantages_R = batch.advantages_R.to(logprobs_R.dtype)
    ratio_R = (logprobs_R - batch.rollout_logprobs_R).exp()
    bounded_R = ratio_R.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss_R = -torch.minimum(ratio_R * advantages_R, bounded_R * advantages_R)
    clipped_R = (ratio_R * advantages_R > bounded_R * advantages_R).detach()
    kl_R = torch.zeros_like(logprobs_R)
    if reference_logprobs_R is not None:
        delta_R = reference_logprobs_R - logprobs_R
        kl_R = delta_R.exp() - delta_R - 1  # the k3 estimator (Schulman 2020): unbiased and never negative
        loss_R = loss_R + config.kl_coef * kl_R
    return TokenLoss(loss_R, clipped_R, kl_R.detach())


def token_weights(config: LearningConfig, batch: MicroBatch, total_tokens: int, total_sequences: int) -> torch.Tensor:
    """Weights over response tokens that sum to one over the whole optimiser step, however it is cut into micro-batches."""
    mask_R = batch.mask_R.float()
    if config.loss_mean == "token":
        return mask_R / total_tokens
    lengths = torch.zeros(batch.num_sequences, device=mask_R.device).index_add(0, batch.sequence_R, mask_R)
    return mask_R / lengths.clamp(min=1)[batch.sequence_R] / total_sequences
