"""How often a proposed node was what the policy sampled, by what was known of it; learned from walked trees.

Nodes fall into cells (such as "second candidate, half a unit of score behind the first"), and a cell's rate
is the share of its nodes that were right, among those whose parent was on the path. It starts from a guess
that counts like a few nodes, and old walks count less and less, because policy and drafter change. All of it
lies on the device, and a step's own graph updates it.
"""

import torch

# Nodes that the first guess counts for.
PRIOR_NODES = 20.0
# What a step leaves of the weight of those before it: about a thousand of them count.
MEMORY = 0.999
# No cell is certain, so a child is always less likely to be reached than its parent.
LOWEST_RATE = 1e-3
HIGHEST_RATE = 0.98


class Calibration:
    """The rates of cells `0 .. len(prior) - 1`, from the guesses `prior`."""

    def __init__(self, prior: list[float], device: torch.device) -> None:
        self.prior_C = torch.tensor(prior, dtype=torch.float32, device=device)
        # Nodes of each cell whose parent was on the path, and how many of them were, too.
        self.tried_C = torch.zeros_like(self.prior_C)
        self.right_C = torch.zeros_like(self.prior_C)

    def lend(self, other: "Calibration", first: int) -> None:
        """Makes the cells from `first` on the other's, so that both learn from either's trees."""
        own = slice(first, first + len(other.prior_C))
        assert len(self.prior_C[own]) == len(other.prior_C)
        other.tried_C = self.tried_C[own]
        other.right_C = self.right_C[own]

    def log_rates(self) -> torch.Tensor:
        """Returns the log of every cell's rate, `[C]`."""
        rate_C = (self.right_C + PRIOR_NODES * self.prior_C) / (self.tried_C + PRIOR_NODES)
        return rate_C.clamp(LOWEST_RATE, HIGHEST_RATE).log()

    def observe(self, cells_N: torch.Tensor, tried_N: torch.Tensor, right_N: torch.Tensor) -> None:
        """Takes in a step's nodes; those that are not `tried_N` say nothing."""
        for count_C, seen_N in ((self.tried_C, tried_N), (self.right_C, tried_N & right_N)):
            # Whole numbers, so that the order of the additions does not matter.
            fresh_C = torch.zeros_like(count_C).scatter_add_(0, cells_N, seen_N.to(count_C.dtype))
            count_C.mul_(MEMORY).add_(fresh_C)
