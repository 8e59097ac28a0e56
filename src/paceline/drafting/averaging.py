"""The mean of a head's newest weights: what is published of one that learns at a constant rate.

Single updates, each of a few thousand tokens, leave noise in the weights that a rate which falls to zero
would have taken out; a run does not know when it ends. The mean over the newest part of the updates does the
same at any time (polynomial-decay averaging, arXiv 1212.1824); training continues from the plain weights.
"""

from collections.abc import Mapping

import torch

# The mean is over about one update in so many: the newest,
PART = 8
# and over no more than these, since the policy that they follow moves.
LONGEST = 32


class WeightAverage:
    """A running mean of an optimiser's weights, in their types."""

    def __init__(self, masters: Mapping[str, torch.Tensor]) -> None:
        """`masters` are read at every update."""
        self.updates = 0
        self.mean = {name: master.detach().clone() for name, master in masters.items()}

    @torch.no_grad()
    def update(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Adds the weights after an optimiser step to the mean."""
        self.updates += 1
        share = max(PART / (self.updates + PART - 1), 1 / LONGEST)
        torch._foreach_lerp_(list(self.mean.values()), [masters[name] for name in self.mean], share)

    def restart(self, masters: Mapping[str, torch.Tensor]) -> None:
        self.updates = 0
        for name, mean in self.mean.items():
            mean.copy_(masters[name].detach())
