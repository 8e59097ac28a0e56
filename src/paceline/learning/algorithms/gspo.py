"""GSPO (arXiv 2507.18071, eqs. 5 to 7): the importance ratio belongs to the sequence, as the reward does.

    s_i = (pi_theta(y_i) / pi_old(y_i)) ^ (1 / |y_i|) = exp(mean over tokens of log r_it)
    L   = 1/G sum_i -min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i)

Advantages are those of GRPO. A mean of log ratios moves far less than one token's, hence the narrow clip
(section 5.1: 3e-4 and 4e-4). With `loss_mean: sequence` each response counts once, as in the paper, which has
no KL.
"""

import torch

from paceline.learning.algorithms.base import TokenLoss, clipped_surrogate, log_ratio, with_reference_kl
from paceline.learning.algorithms.grpo import GRPO
from paceline.learning.batch import MicroBatch


class GSPO(GRPO):
    """GRPO with one importance ratio per sequence."""

    def token_loss(
        self, batch: MicroBatch, logprobs_R: torch.Tensor, reference_R: torch.Tensor | None
    ) -> TokenLoss:
        mask_R = batch.mask_R.to(logprobs_R.dtype)
        mean_B = batch.sequence_sums(log_ratio(batch, logprobs_R)) / batch.sequence_sums(mask_R).clamp(min=1)
        ratio_R = mean_B.exp()[batch.sequence_R]
        loss_R, clipped_R = clipped_surrogate(self.config, ratio_R, batch.advantages_R.to(logprobs_R.dtype))
        return with_reference_kl(self.config, loss_R, clipped_R, logprobs_R, reference_R)
