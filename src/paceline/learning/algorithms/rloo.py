"""RLOO, REINFORCE leave-one-out (arXiv 2402.14740, section 3.2): each response's baseline is its siblings.

    R_i = r_i - kl_coef sum over t of (log pi_old(y_t) - log pi_ref(y_t))      the KL is part of the reward
    A_i = R_i - mean of R_j over j != i
    s_i = pi_theta(y_i) / pi_old(y_i)                                          of whole responses
    L   = 1/N sum_i -min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i)

On policy s_i is 1 and the gradient is the paper's, -A_i grad log pi_theta(y_i); the clip is for later updates
of a step. With `loss_mean: sequence` each response counts once. A group whose rewards are all equal has
no signal: what is left, the KL alone, is not learned from.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch

from paceline.learning.algorithms.base import Advantage, LogRatios, TokenLoss, clipped_surrogate, log_ratio
from paceline.learning.algorithms.grpo import GRPO
from paceline.learning.batch import MicroBatch
from paceline.learning.logprobs import MAX_LOG_RATIO
from paceline.types import Group


class RLOO(GRPO):
    """REINFORCE on whole responses, each compared with the others of its prompt."""

    kl_in_reward: ClassVar[bool] = True

    def advantages(
        self, groups: Sequence[Group], log_ratios: LogRatios | None = None
    ) -> list[list[Advantage]]:
        return [
            self._leave_one_out(group, None if log_ratios is None else log_ratios[i])
            for i, group in enumerate(groups)
        ]

    def _leave_one_out(self, group: Group, log_ratios: Sequence[Sequence[float]] | None) -> list[Advantage]:
        if len(set(group.rewards)) < 2:
            return [Advantage(0.0)] * len(group.samples)
        values = list(group.rewards)
        for i, sample in enumerate(group.samples if log_ratios is not None else ()):
            pairs = zip(log_ratios[i], sample.completion.loss_mask, strict=True)
            values[i] -= self.config.kl_coef * sum(ratio for ratio, sampled in pairs if sampled)
        total, others = sum(values), len(values) - 1
        return [Advantage(value - (total - value) / others) for value in values]

    def token_loss(
        self, batch: MicroBatch, logprobs_R: torch.Tensor, reference_R: torch.Tensor | None
    ) -> TokenLoss:
        whole_B = batch.sequence_sums(log_ratio(batch, logprobs_R))
        ratio_R = whole_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()[batch.sequence_R]
        loss_R, clipped_R = clipped_surrogate(self.config, ratio_R, batch.advantages_R.to(logprobs_R.dtype))
        return TokenLoss(loss_R, clipped_R, torch.zeros_like(logprobs_R))
