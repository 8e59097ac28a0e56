"""The trees that a drafter proposes, and what is learned from the way through them.

A drafter passes more candidates than there is room for, each with how likely it is to be reached: the
product of the rates on its path (`calibration.py`). The likeliest are proposed (`kernels/tree_choice.py`).
"""

import torch

from paceline.drafting.base import DrafterContext, TreeStep
from paceline.drafting.calibration import Calibration
from paceline.kernels.tree_choice import Candidates, ProposedNodes, choose_nodes


class TreeProposals:
    """The trees that one drafter proposes, and what it learns from them."""

    def __init__(self, context: DrafterContext, calibration: Calibration) -> None:
        self.calibration = calibration
        # Cells belong to the drafter, all else to the step.
        cells_SK = torch.full_like(context.proposals_SK, -1)
        self.nodes = ProposedNodes(context.proposals_SK, context.parents_SK, cells_SK)

    def propose(self, slots_R: torch.Tensor, candidates: Candidates, count: int) -> torch.Tensor:
        """Proposes the best `count` candidates and returns their numbers, `[R, count]`."""
        return choose_nodes(candidates, count, slots_R, self.nodes)

    def observe(self, step: TreeStep) -> None:
        """Learns from the nodes whose parent was on the path: each was right or was not."""
        self.calibration.observe(step, self.nodes)
