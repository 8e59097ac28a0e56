"""Supervised fine-tuning: every response is imitated, whatever its reward.

    A = 1
    L = mean over tokens of -A_i log pi_theta(y_it)

`paceline sft` learns with it from examples that nobody sampled.
"""

from collections.abc import Sequence

import torch

from paceline.learning.algorithms.base import Advantage, LogRatios, TokenLoss
from paceline.learning.algorithms.grpo import GRPO
from paceline.learning.batch import MicroBatch
from paceline.types import Group


class SFT(GRPO):
    """The mean negative logprob of what there is."""

    def advantages(
        self, groups: Sequence[Group], log_ratios: LogRatios | None = None
    ) -> list[list[Advantage]]:
        return [[Advantage(1.0)] * len(group.samples) for group in groups]

    def token_loss(
        self, batch: MicroBatch, logprobs_R: torch.Tensor, reference_R: torch.Tensor | None
    ) -> TokenLoss:
        loss_R = torch.where(batch.mask_R, -batch.advantages_R.to(logprobs_R.dtype) * logprobs_R, 0.0)
        nothing_R = torch.zeros_like(logprobs_R)
        return TokenLoss(loss_R, nothing_R.bool(), nothing_R)
