"""The scales of vLLM's FP8 KV cache as the learner measures them, for `cache_scales.py`."""

from collections import deque
from collections.abc import Sequence

import torch

from paceline.policy.attention import PackedAttention
from paceline.policy.decoder import Decoder

# What the largest number becomes; E4M3 ends at 448, so numbers may double unseen. vLLM's own constant.
RANGE = 200.0
# The smallest number that counts as the largest.
SMALLEST = 1e-6
# Texts that scales are measured on, and tokens of each: its first.
TEXTS = 8
TEXT_TOKENS = 512


class MeasuredScales:
    """Scales of a policy's queries, keys and values, on the newest texts."""

    def __init__(self, policy: Decoder, first_text: Sequence[int]) -> None:
        """`first_text` is measured until there are others."""
        self.policy = policy
        # It stays where it is: vLLM's process may have mapped it.
        self.scales_L3 = torch.ones(policy.config.num_layers, 3, device=policy.device)
        self._first_text = tuple(first_text)
        self._texts: deque[tuple[int, ...]] = deque(maxlen=TEXTS)

    def see(self, text: Sequence[int]) -> None:
        """Adds a text that the policy wrote, prompt included."""
        if text:
            self._texts.append(tuple(text[:TEXT_TOKENS]))

    @torch.no_grad()
    def measure(self) -> torch.Tensor:
        """Returns the scales `[layers, 3]` of queries, keys and values with the policy's present weights."""
        texts = list(self._texts) or [self._first_text]
        packed = PackedAttention([len(text) for text in texts], self.policy.device)
        found: dict[int, torch.Tensor] = {}

        def observe(layer: int, *tensors: torch.Tensor) -> None:
            found[layer] = torch.stack([tensor.abs().amax().float() for tensor in tensors])

        packed.observe = observe
        tokens_T = torch.tensor([token for text in texts for token in text], device=self.policy.device)
        self.policy(tokens_T, packed.positions_T, packed)
        largest_L3 = torch.stack([found[layer] for layer in range(len(found))])
        return self.scales_L3.copy_(largest_L3.clamp(min=SMALLEST) / RANGE)
