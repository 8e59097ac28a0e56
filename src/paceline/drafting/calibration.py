"""How often a proposed node was what the policy sampled, by what was known of it; learned from walked trees.

Nodes fall into cells (such as "second candidate, half a unit of score behind the first"), and a cell's rate
is the share of its nodes that were right, among those whose parent was on the path. It starts from a guess
that counts like a few nodes, and old walks count less and less, because policy and drafter change. All of it
lies on the device, and a step's own graph updates it (`kernels/tree_counts.py`).
"""

import torch

from paceline.drafting.base import TreeStep
from paceline.kernels.tree_choice import ProposedNodes
from paceline.kernels.tree_counts import count_nodes, log_rates


class Calibration:
    """The rates of cells `0 .. len(prior) - 1`, from the guesses `prior`."""

    def __init__(self, prior: list[float], device: torch.device) -> None:
        self.prior_C = torch.tensor(prior, dtype=torch.float32, device=device)
        # Nodes of each cell whose parent was on the path, and how many of them were, too.
        self.tried_C = torch.zeros_like(self.prior_C)
        self.right_C = torch.zeros_like(self.prior_C)
        self.fresh_2C = self.prior_C.new_zeros(2, len(prior))

    def counts(self) -> torch.Tensor:
        """Returns what has been learned, nodes tried and right `[2, C]`, as a copy."""
        return torch.stack((self.tried_C, self.right_C))

    def load_counts(self, counts_2C: torch.Tensor) -> None:
        """Restores what `counts` returned; counts of a different number of cells are ignored."""
        if counts_2C.shape[-1] == len(self.tried_C):
            self.tried_C.copy_(counts_2C[0])
            self.right_C.copy_(counts_2C[1])

    def log_rates(self) -> torch.Tensor:
        return log_rates(self.prior_C, self.tried_C, self.right_C)

    def observe(self, step: TreeStep, nodes: ProposedNodes) -> None:
        """Counts a step's verified trees, whose proposed nodes are `nodes`."""
        rows = step.walk.path_RQ, step.queries.cache_slots_RQ, step.slots_R
        count_nodes(*rows, nodes.parents_SK, nodes.cells_SK, self.tried_C, self.right_C, self.fresh_2C)
