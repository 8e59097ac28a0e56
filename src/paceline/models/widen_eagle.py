"""An eagle head for a widened policy: the small head's function at the cost of the wide policy's head.

So a head is trained on the small policy, which is cheap, and its acceptance is kept exactly (`widen.py` says
how a policy is widened).
"""

import torch

from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.models.widen import (
    Placement,
    layer_places,
    place,
    place_attention,
    place_feed_forward,
    place_norm,
)
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder


@torch.no_grad()
def widen_eagle(head: EagleHead, small: DecoderConfig, wide_policy: Decoder) -> EagleHead:
    """Returns a head that drafts for `wide_policy` as `head` does for the policy it was widened from.

    `small` is that policy's configuration.
    """
    head.config.check_against(small)
    wide, dtype, device = wide_policy.config, wide_policy.dtype, wide_policy.device
    places = layer_places(small.num_layers, wide.num_layers)
    config = config_for(wide, tuple(places[i] for i in head.config.captured_layers), head.config.draft_vocab)
    out = EagleHead(config, dtype, device)
    out.draft_to_target.copy_(head.draft_to_target)
    out.initialise(wide_policy, seed=0)
    at = Placement.of(head.config.layer, config.layer, device)
    # What writes into the residual stream, or reads a padded one into scores, is zero outside the small head.
    for linear in (out.fc, out.attention.output, out.feed_forward.down, out.head):
        linear.weight.zero_()
    parts = len(config.captured_layers)
    place(out.fc.weight, head.fc.weight, at.residual, _columns(at.residual, parts, config.layer.hidden_size))
    for name in ("embedding_norm", "hidden_norm", "feed_forward_norm", "norm"):
        place_norm(getattr(out, name).weight, getattr(head, name).weight, at)
    place_attention(out.attention, head.attention, at, _columns(at.residual, 2, config.layer.hidden_size))
    place_feed_forward(out.feed_forward, head.feed_forward, at)
    out.head.weight[:, at.residual] = head.head.weight.to(out.head.weight)
    return out


def _columns(residual: torch.Tensor, parts: int, width: int) -> torch.Tensor:
    """Returns where the small model's dimensions lie in several residual streams side by side."""
    return torch.cat([residual + part * width for part in range(parts)])
