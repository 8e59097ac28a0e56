"""CISPO (arXiv 2506.13585, eqs. 4 and 5): the weight of a token is clipped, never its gradient.

    L = mean over tokens of -sg(min(r_it, 1 + clip_high)) A_i log pi_theta(y_it)

PPO's clip drops a token whose ratio left the range, often the rare one that begins a new thought; here it
keeps a bounded weight. There is no lower bound (`clip_low` is not looked at), no KL, and advantages are those
of GRPO. The paper names no bound; 1 + clip_high = 5 is that of ScaleRL (arXiv 2510.13786).
"""

import torch

from paceline.learning.algorithms.base import TokenLoss, log_ratio, with_reference_kl
from paceline.learning.algorithms.grpo import GRPO
from paceline.learning.batch import MicroBatch


class CISPO(GRPO):
    """REINFORCE with importance weights that are cut at 1 + clip_high, and GRPO's advantages."""

    def token_loss(
        self, batch: MicroBatch, logprobs_R: torch.Tensor, reference_R: torch.Tensor | None
    ) -> TokenLoss:
        ratio_R = log_ratio(batch, logprobs_R).exp().detach()
        most = 1 + self.config.clip_high
        weight_R = ratio_R.clamp(max=most) * batch.advantages_R.to(logprobs_R.dtype)
        loss_R = torch.where(batch.mask_R, -weight_R * logprobs_R, 0.0)
        return with_reference_kl(self.config, loss_R, ratio_R > most, logprobs_R, reference_R)
