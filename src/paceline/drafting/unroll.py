"""The head along a known text, every start at once: what a draft of several tokens computes, in parallel over its starts.

A draft that starts after the policy's states up to t takes its first step from true features, g_0 .. g_t, and each further one
from what the head itself said. Where the drafted tokens are the text's own, the draft's step j stands at entry t + j and sees

    entries            0  1  ..  t    t+1   t+2  ..  t+j
    made by step       0  0  ..  0     1     2   ..   j        keys and values of the head's own layer

So a query of step j at entry q sees step 0's keys up to q - j, and of each step i = 1 .. j the one key at q - j + i. This is
EAGLE-3's "training-time test" (arXiv 2503.01840, section 3.2), and the way to measure acceptance: a draft is followed only as
long as it agrees with the text. Entries are packed as the policy's tokens are; entry q is made of g_q and token q + 1. What
reaches before a sequence's first entry (q < j) is meaningless, and nothing that has meaning looks at it.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from paceline.drafting.eagle_head import EagleHead
from paceline.policy.attention import PackedAttention


def unroll(
    head: EagleHead, captured: list[torch.Tensor], embedding_VE: torch.Tensor, tokens_T: torch.Tensor, packed: PackedAttention, steps: int
) -> Iterator[torch.Tensor]:
    """x_TE of each step: at entry q of step j, the state that predicts token q + 2 for the draft that started at q - j."""
    following_TE = F.embedding(tokens_T.roll(-1), embedding_VE.detach())  # the last entry of a sequence has none and is not used
    attend = UnrolledAttention(packed)
    x_TE = head.features(captured)
    for step in range(steps):
        x_TE = head(x_TE if step == 0 else x_TE.roll(1, 0), following_TE, packed.positions_T, attend)
        yield x_TE


class UnrolledAttention:
    """An `attend` that is called once per step, in order."""

    def __init__(self, packed: PackedAttention) -> None:
        self.packed = packed
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def __call__(self, layer: int, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        step = len(self.keys)
        if step == 0:
            self._keep(q_THD, k_THD, v_THD)
            return self.packed(layer, q_THD, k_THD, v_THD)
        self._keep(q_THD, k_THD, v_THD)
        # Own entries lie on diagonals: one key of each step per query.
        own_keys = [key.roll(step - i, 0) for i, key in enumerate(self.keys) if i > 0]
        own_values = [value.roll(step - i, 0) for i, value in enumerate(self.values) if i > 0]
        scale = q_THD.shape[-1] ** -0.5
        own_BHLS = self.packed.pad(torch.stack([(q_THD * key).sum(-1) for key in own_keys], -1))
        q_BHLD, k_BHLD, v_BHLD = (self.packed.pad(x) for x in (q_THD, self.keys[0], self.values[0]))
        seen_LL = torch.ones(self.packed.longest, self.packed.longest, dtype=torch.bool, device=q_THD.device).tril(-step)
        true_BHLL = (q_BHLD @ k_BHLD.transpose(-1, -2)).masked_fill(~seen_LL, -torch.inf)
        wide = torch.promote_types(q_THD.dtype, torch.float32)
        weights = (torch.cat((true_BHLL, own_BHLS), -1).to(wide) * scale).softmax(-1).to(q_THD.dtype)
        out_THD = self.packed.unpad(weights[..., : self.packed.longest] @ v_BHLD)
        own_weights_THS = self.packed.unpad(weights[..., self.packed.longest :])
        for i, value_THD in enumerate(own_values):
            out_THD = out_THD + own_weights_THS[..., i : i + 1] * value_THD
        return out_THD

    def _keep(self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> None:
        repeats = q_THD.shape[1] // k_THD.shape[1]
        self.keys.append(k_THD.repeat_interleave(repeats, 1))
        self.values.append(v_THD.repeat_interleave(repeats, 1))
