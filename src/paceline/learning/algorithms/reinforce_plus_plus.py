"""REINFORCE++ (arXiv 2501.03262, eqs. 8 to 10): no critic, no groups, advantages normalised over a step.

This is the paper's plain variant (any number of samples per prompt), not "REINFORCE++ w/ Baseline":

    KL_t = log pi_old(y_t) - log pi_ref(y_t)                the k1 estimate, of the policy that sampled
    A_t  = R - kl_coef * sum over i >= t of KL_i            the KL is a reward for each token, undiscounted
    A_t  = (A_t - mean) / std                               over all sampled tokens of the step
    L    = mean over tokens of -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)

Where all rewards of the step are equal, every advantage is zero: normalising would scale what is left, the
KL, up to unit size. Only responses with sampled tokens count there, as they alone are normalised.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

import torch

from paceline.config import LearningConfig
from paceline.learning.algorithms.base import (
    STD_EPSILON,
    Advantage,
    LogRatios,
    TokenLoss,
    clipped_surrogate,
    log_ratio,
)
from paceline.learning.batch import MicroBatch
from paceline.types import Group


class ReinforcePlusPlus:
    """Advantages of each token, normalised over the step, with the KL in the reward."""

    kl_in_reward: ClassVar[bool] = True

    def __init__(self, config: LearningConfig) -> None:
        self.config = config

    def advantages(
        self, groups: Sequence[Group], log_ratios: LogRatios | None = None
    ) -> list[list[Advantage]]:
        rewards = {
            sample.score.reward
            for group in groups
            for sample in group.samples
            if any(sample.completion.loss_mask)
        }
        if len(rewards) < 2:
            return [[Advantage(0.0)] * len(group.samples) for group in groups]
        penalties = self._penalties(groups, log_ratios)
        unscaled: list[float] = []
        for group, group_penalties in zip(groups, penalties, strict=True):
            for sample, sample_penalties in zip(group.samples, group_penalties, strict=True):
                mask = sample.completion.loss_mask
                unscaled += [
                    sample.score.reward - p
                    for p, sampled in zip(sample_penalties, mask, strict=True)
                    if sampled
                ]
        mean = sum(unscaled) / max(1, len(unscaled))
        deviation = (sum((x - mean) ** 2 for x in unscaled) / max(1, len(unscaled) - 1)) ** 0.5 + STD_EPSILON
        return [
            [
                Advantage((reward - mean) / deviation, tuple(p / deviation for p in sample_penalties))
                for reward, sample_penalties in zip(group.rewards, group_penalties, strict=True)
            ]
            for group, group_penalties in zip(groups, penalties, strict=True)
        ]

    def _penalties(
        self, groups: Sequence[Group], log_ratios: LogRatios | None
    ) -> list[list[tuple[float, ...]]]:
        """Returns kl_coef times the sum of the KL from each token on; observations add nothing."""
        if log_ratios is None:
            return [[(0.0,) * len(sample.completion.tokens) for sample in group.samples] for group in groups]
        penalties = []
        for group, group_ratios in zip(groups, log_ratios, strict=True):
            penalties.append([])
            for sample, ratios in zip(group.samples, group_ratios, strict=True):
                counted = [
                    x if sampled else 0.0
                    for x, sampled in zip(ratios, sample.completion.loss_mask, strict=True)
                ]
                to_go = list(accumulate(reversed(counted)))[::-1]
                penalties[-1].append(tuple(self.config.kl_coef * x for x in to_go))
        return penalties

    def token_loss(
        self, batch: MicroBatch, logprobs_R: torch.Tensor, reference_R: torch.Tensor | None
    ) -> TokenLoss:
        ratio_R = log_ratio(batch, logprobs_R).exp()
        loss_R, clipped_R = clipped_surrogate(self.config, ratio_R, batch.advantages_R.to(logprobs_R.dtype))
        return TokenLoss(loss_R, clipped_R, torch.zeros_like(logprobs_R))
