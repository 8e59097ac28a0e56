"""How far an eagle head's states are from the policy that teaches it, and the gradient of that.

With p the policy's distribution and q the head's, both at the temperature that the policy sampled at:

    cross-entropy of p within the draft vocabulary and q      learned; by a logit its gradient is (q - p) / T
    overlap, the sum of min(p, q) over the whole vocabulary   what rejection sampling would accept
"""

import torch

from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.head_pass import add_gradient, norm_backward
from paceline.kernels.norm_training import fork_norm
from paceline.policy.decoder import Decoder, wide_linear


@torch.no_grad()
def teacher_probabilities(
    policy: Decoder, head: EagleHead, hidden_RE: torch.Tensor, temperatures_R: torch.Tensor
) -> torch.Tensor:
    """Returns the policy's probabilities of the draft vocabulary, `[R, D]`; their sum is at most 1."""
    logits_RV = policy.logits(hidden_RE)
    return (logits_RV / temperatures_R[:, None].to(logits_RV.dtype)).softmax(-1)[:, head.draft_to_target]


class Comparison:
    """States of some steps of drafts, `[U, R, E]`, beside the policy's probabilities at their places."""

    @torch.no_grad()
    def __init__(
        self, head: EagleHead, x_URE: torch.Tensor, p_RD: torch.Tensor, temperatures_R: torch.Tensor
    ) -> None:
        self.head = head
        self.shape = x_URE.shape
        self.x_NE = x_URE.reshape(-1, x_URE.shape[-1])
        self.normed_NE, _ = fork_norm(self.x_NE, None, head.norm.weight, head.norm.eps)
        logits_URD = wide_linear(self.normed_NE, head.head.weight).unflatten(0, self.shape[:-1])
        self.temperatures_R = temperatures_R.to(logits_URD.dtype)
        # Within the draft vocabulary it teaches as a distribution.
        self.teacher_RD = p_RD / p_RD.sum(-1, keepdim=True).clamp_min(torch.finfo(p_RD.dtype).tiny)
        logq_URD = logits_URD.div_(self.temperatures_R[:, None]).log_softmax(-1)
        del logits_URD  # each of them is as large as all else
        negative_entropy_R = torch.xlogy(self.teacher_RD, self.teacher_RD).sum(-1)
        # KL from teacher to head of each state, and 1 - TV between policy and head over the whole vocabulary.
        self.divergence_UR = negative_entropy_R - (self.teacher_RD * logq_URD).sum(-1)
        self.q_URD = logq_URD.exp_()
        self.overlap_UR = torch.minimum(p_RD, self.q_URD).sum(-1)

    @torch.no_grad()
    def sums(self, used_UR: torch.Tensor) -> torch.Tensor:
        """Returns of each step `[U, 3]`: how many states are used, their divergence and overlap."""
        counts_UR = torch.ones_like(self.overlap_UR)
        values_UR3 = torch.stack((counts_UR, self.divergence_UR, self.overlap_UR), dim=-1)
        return torch.where(used_UR.unsqueeze(-1), values_UR3, 0.0).sum(1)

    @torch.no_grad()
    def backward(self, weights_UR: torch.Tensor) -> torch.Tensor:
        """Adds the gradients of the head's vocabulary and last norm; returns that of the states.

        They are those of the cross-entropies' sum with these weights. It works once.
        """
        head = self.head
        scales_UR = (weights_UR / self.temperatures_R).to(self.q_URD.dtype)
        # A teacher without any mass in the draft vocabulary teaches nothing.
        d_URD = self.q_URD.mul_(self.teacher_RD.sum(-1, keepdim=True)).sub_(self.teacher_RD)
        d_ND = d_URD.mul_(scales_UR.unsqueeze(-1)).flatten(0, 1).to(self.x_NE.dtype)
        add_gradient(head.head.weight, d_ND.t() @ self.normed_NE)
        return norm_backward(d_ND @ head.head.weight, None, self.x_NE, head.norm).view(self.shape)
