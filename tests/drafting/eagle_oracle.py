"""An eagle head's draft written out token by token, from the definition: one start, one entry at a time,
plain loops.

It shares nothing with `unroll.py` and `training.py` but the head's weights.
"""

import torch

from paceline.drafting.eagle_head import EagleHead
from paceline.policy.decoder import Decoder
from paceline.policy.rope import rotate


def norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module.weight * x / (x.pow(2).mean() + module.eps).sqrt()


def policy_states(
    policy: Decoder, tokens: list[int], layers: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[L, V]` and the concatenated states that enter `layers`, from a forward pass over one
    sequence.
    """
    length = len(tokens)
    bias = torch.full((length, length), -torch.inf, dtype=policy.dtype).triu(1)

    def attend(layer, q, k, v):
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        weights = (torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5 + bias).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    x = policy.embedding.weight[torch.tensor(tokens)]
    entering = []
    for index, layer in enumerate(policy.layers):
        entering.append(x)
        x = layer(x, policy.rope_table[torch.arange(length)], index, attend)
    return policy.norm(x) @ policy.head.weight.T, torch.cat([entering[i] for i in layers], -1)


class Draft:
    """The entries of one draft: true ones up to its start, its own after."""

    def __init__(
        self, policy: Decoder, head: EagleHead, captured_L3E: torch.Tensor, tokens: list[int], start: int
    ) -> None:
        self.policy, self.head = policy, head
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for entry in range(start + 1):
            self.x = self.append(head.fc.weight @ captured_L3E[entry], tokens[entry + 1])

    def append(self, feature_E: torch.Tensor, following_token: int) -> torch.Tensor:
        head, position = self.head, len(self.keys)
        attention = head.attention
        x = torch.cat(
            (
                norm(head.embedding_norm, self.policy.embedding.weight[following_token]),
                norm(head.hidden_norm, feature_E),
            )
        )
        heads = (attention.qkv.weight @ x).view(-1, attention.head_dim)
        rope = head.rope_table[position : position + 1]
        q = rotate(heads[None, : attention.heads], rope)[0]
        self.keys.append(rotate(heads[None, attention.heads : -attention.kv_heads], rope)[0])
        self.values.append(heads[-attention.kv_heads :])
        out = []
        for h in range(attention.heads):
            group = h // (attention.heads // attention.kv_heads)
            scores = torch.stack([key[group] @ q[h] for key in self.keys]) * attention.head_dim**-0.5
            out.append(sum(w * value[group] for w, value in zip(scores.softmax(0), self.values, strict=True)))
        x = feature_E + attention.output.weight @ torch.cat(out)
        gate, up = (head.feed_forward.gate_up.weight @ norm(head.feed_forward_norm, x)).chunk(2)
        return x + head.feed_forward.down.weight @ (gate * gate.sigmoid() * up)

    def step(self, token: int) -> None:
        """Continues with a drafted token."""
        self.x = self.append(self.x, token)

    def logits(self) -> torch.Tensor:
        """Over the draft vocabulary, of the token after the last one given."""
        return self.head.head.weight @ norm(self.head.norm, self.x)
