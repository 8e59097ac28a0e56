"""From candidates to a tree: which nodes are proposed, and what is learned from the way through them.

A drafter hands in more candidates than there is room for, each with how likely it is to be reached: the
product of the rates on its way (`calibration.py`). The likeliest are proposed, best first. A child is less
likely than its parent, so whoever is chosen has its parent before it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.drafting.base import DrafterContext, TreeStep
from paceline.drafting.calibration import Calibration

# The parent of candidates that follow the row's last token.
ROOT = -1


@dataclass(frozen=True)
class Candidates:
    """Possible nodes of R trees, N each, in any order; siblings differ."""

    # -1: there is none.
    tokens_RN: torch.Tensor
    # The candidates' numbers, or ROOT.
    parents_RN: torch.Tensor
    # The log of how likely a node is to be reached; -inf where there is none.
    values_RN: torch.Tensor
    # The calibration's cells.
    cells_RN: torch.Tensor


@dataclass(frozen=True)
class ChosenNodes:
    """The nodes of R trees, K each, the likeliest first, as `kernels/tree_gather.py` wants them."""

    tokens_RK: torch.Tensor
    parents_RK: torch.Tensor
    # Which candidate each node was; those that do not exist stand for any.
    candidates_RK: torch.Tensor


def choose_nodes(candidates: Candidates, count: int) -> ChosenNodes:
    """Returns the `count` candidates that are most likely to be reached; less where there are not so many."""
    room = min(count, candidates.values_RN.shape[1])
    chosen_RK = candidates.values_RN.sort(dim=1, descending=True, stable=True).indices[:, :room]
    exists_RK = candidates.values_RN.gather(1, chosen_RK) > -torch.inf
    number_K = torch.arange(1, room + 1, device=chosen_RK.device)
    node_RN = torch.zeros_like(candidates.parents_RN).scatter_(1, chosen_RK, number_K.expand_as(chosen_RK))
    parent_RK = candidates.parents_RN.gather(1, chosen_RK)
    parents_RK = torch.where(exists_RK & (parent_RK != ROOT), node_RN.gather(1, parent_RK.clamp(min=0)), 0)
    tokens_RK = torch.where(exists_RK, candidates.tokens_RN.gather(1, chosen_RK), -1)
    missing = (0, count - room)
    return ChosenNodes(
        F.pad(tokens_RK, missing, value=-1), F.pad(parents_RK, missing), F.pad(chosen_RK, missing)
    )


class TreeProposals:
    """The trees that one drafter proposes, and what it learns from them."""

    def __init__(self, context: DrafterContext, calibration: Calibration) -> None:
        self.context = context
        self.calibration = calibration
        # The cell of each node that was proposed last; -1: there was none.
        self.cells_SK = torch.full_like(context.proposals_SK, -1)

    def propose(self, slots_R: torch.Tensor, candidates: Candidates, count: int) -> ChosenNodes:
        """Writes the best `count` candidates into proposals and parents, and returns them."""
        nodes = choose_nodes(candidates, count)
        self.context.proposals_SK[slots_R, :count] = nodes.tokens_RK
        self.context.parents_SK[slots_R, :count] = nodes.parents_RK
        values_RK = candidates.values_RN.gather(1, nodes.candidates_RK)
        self.context.values_SK[slots_R, :count] = values_RK.to(self.context.values_SK.dtype)
        cells_RK = candidates.cells_RN.gather(1, nodes.candidates_RK)
        self.cells_SK[slots_R, :count] = torch.where(nodes.tokens_RK >= 0, cells_RK, -1)
        return nodes

    def observe(self, step: TreeStep) -> None:
        """Learns from the nodes whose parent was on the path: each was right or was not."""
        path_RQ = step.walk.path_RQ
        num_queries = path_RQ.shape[1]
        node_Q = torch.arange(num_queries, device=path_RQ.device)
        on_path_RQ = (path_RQ.unsqueeze(2) == node_Q).any(1)
        parents_RK = self.context.parents_SK[step.slots_R, : num_queries - 1]
        cells_RK = self.cells_SK[step.slots_R, : num_queries - 1]
        exists_RK = (cells_RK >= 0) & (step.verified_RQ[:, 1:] >= 0)
        tried_RK = exists_RK & on_path_RQ.gather(1, parents_RK)
        self.calibration.observe(
            cells_RK.clamp(min=0).flatten(), tried_RK.flatten(), on_path_RQ[:, 1:].flatten()
        )
