"""GRPO (arXiv 2402.03300, eq. 3), the base of the others.

    A_i  = (R_i - mean(R)) / std(R)                                  within the group of one prompt
    r_it = pi_theta(y_it) / pi_old(y_it)
    L    = mean of -min(r_it A_i, clip(r_it, 1 - low, 1 + high) A_i) + kl_coef KL_it

The paper takes the mean within each response first and kl_coef = 0.04 (`loss_mean: sequence`, `kl_coef:
0.04`); the defaults here are the token mean and no KL, with which verl and TRL run it today.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch

from paceline.config import LearningConfig
from paceline.learning.algorithms.base import (
    Advantage,
    LogRatios,
    TokenLoss,
    clipped_surrogate,
    log_ratio,
    normalise,
    with_reference_kl,
)
from paceline.learning.batch import MicroBatch
from paceline.types import Group


class GRPO:
    """Advantages normalised within each group, and PPO's clipped loss."""

    kl_in_reward: ClassVar[bool] = False

    def __init__(self, config: LearningConfig) -> None:
        self.config = config

    def advantages(
        self, groups: Sequence[Group], log_ratios: LogRatios | None = None
    ) -> list[list[Advantage]]:
        return [[Advantage(value) for value in normalise(group.rewards)] for group in groups]

    def token_loss(
        self, batch: MicroBatch, logprobs_R: torch.Tensor, reference_R: torch.Tensor | None
    ) -> TokenLoss:
        ratio_R = log_ratio(batch, logprobs_R).exp()
        loss_R, clipped_R = clipped_surrogate(self.config, ratio_R, batch.advantages_R.to(logprobs_R.dtype))
        return with_reference_kl(self.config, loss_R, clipped_R, logprobs_R, reference_R)
