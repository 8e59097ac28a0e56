"""On-policy distillation (GKD, arXiv 2306.13649): the teacher judges what the policy itself has sampled.

    L = mean over sampled tokens of D(pi_theta(. | y_<t), pi_T(. | y_<t)) + reward_weight L_GRPO

D compares distributions (`learning/teacher.py`), and its gradient flows through all of the policy's. A server
tells only log pi_T(y_t), the reverse KL's estimate from one sample; it is learned by policy gradient:

    A_t = reward_weight A_i - (log pi_old(y_t) - log pi_T(y_t))
    L   = mean over sampled tokens of -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)
"""

from collections.abc import Sequence

import torch

from paceline.learning.algorithms.base import (
    Advantage,
    LogRatios,
    TokenLoss,
    clipped_surrogate,
    log_ratio,
    normalise,
)
from paceline.learning.algorithms.grpo import GRPO
from paceline.learning.batch import MicroBatch
from paceline.types import Group


class Distill(GRPO):
    """The divergence from a teacher, alone or beside GRPO's loss on rewards."""

    def advantages(
        self, groups: Sequence[Group], log_ratios: LogRatios | None = None
    ) -> list[list[Advantage]]:
        """As in `Algorithm`; here `log_ratios` are log pi_old - log pi_T, of a server."""
        weight = self.config.distill.reward_weight
        found = []
        for i, group in enumerate(groups):
            penalties = [()] * len(group.samples) if log_ratios is None else map(tuple, log_ratios[i])
            values = normalise(group.rewards)
            found.append(
                [Advantage(weight * value, own) for value, own in zip(values, penalties, strict=True)]
            )
        return found

    def token_loss(
        self, batch: MicroBatch, logprobs_R: torch.Tensor, reference_R: torch.Tensor | None
    ) -> TokenLoss:
        advantages_R = batch.advantages_R.to(logprobs_R.dtype)
        loss_R, clipped_R = clipped_surrogate(self.config, log_ratio(batch, logprobs_R).exp(), advantages_R)
        if batch.divergence_R is None:  # the advantages have it
            return TokenLoss(loss_R, clipped_R, torch.zeros_like(logprobs_R))
        divergence_R = torch.where(batch.mask_R, batch.divergence_R, 0.0)
        return TokenLoss(loss_R + divergence_R, clipped_R, divergence_R.detach())
