"""Heads for tests."""

import torch

from paceline.drafting.eagle_head import EagleHead
from paceline.policy.decoder import Decoder


def random_head(head: EagleHead, policy: Decoder, seed: int) -> EagleHead:
    """Fills a head with parameters that all count; of a fresh one the layer writes nothing."""
    head.initialise(policy, seed)
    generator = torch.Generator(head.fc.weight.device).manual_seed(seed + 1)
    for linear in (head.attention.output, head.feed_forward.down):
        linear.weight.data.normal_(0.0, linear.in_features**-0.5, generator=generator)
    return head
