"""From several continuations to one tree: equal beginnings become one path.

    branches     a b c d            tree     a ─ b ─ c ─ d
                 a b x y                         └─ x ─ y
                 z                           z

How likely a node is follows from how much of the row's text stands before its branch, and from how many other
branches go elsewhere at the same place.
"""

import torch

from paceline.drafting.calibration import Calibration
from paceline.kernels.history_index import LENGTHS
from paceline.kernels.tree_choice import ROOT, Candidates

# Children of a node that are told apart.
RANKS = 3
# P(the policy samples it) by rank among siblings, and by matched tokens: from 2, 4, 8 and 16 on. Guesses.
BRANCH_PRIOR = ((0.4, 0.55, 0.7, 0.85), (0.15, 0.2, 0.2, 0.2), (0.1, 0.1, 0.1, 0.1))


class BranchCalibration(Calibration):
    """How often branches are right, by rank among siblings and by matched tokens."""

    def __init__(self, device: torch.device) -> None:
        super().__init__([rate for rates in BRANCH_PRIOR for rate in rates], device)
        self.boundaries = torch.tensor(LENGTHS[1:], device=device)


def merged_branches(
    tokens_RCK: torch.Tensor, matched_RC: torch.Tensor, calibration: BranchCalibration
) -> Candidates:
    """Returns the nodes of all branches, each beginning once; the branches come best first."""
    branches, count = tokens_RCK.shape[1:]
    device = tokens_RCK.device
    branch_C = torch.arange(branches, device=device)
    exists_RCK = tokens_RCK >= 0
    # Whether branches c and b begin alike, up to and with token k.
    alike_RCBK = (
        ((tokens_RCK.unsqueeze(2) == tokens_RCK.unsqueeze(1)) & exists_RCK.unsqueeze(2)).long().cumprod(-1)
    )
    # A node belongs to the first branch that has it.
    owner_RCK = alike_RCBK.argmax(2)
    is_node_RCK = exists_RCK & (owner_RCK == branch_C.view(-1, 1))
    above_RCBK = torch.cat((torch.ones_like(alike_RCBK[..., :1]), alike_RCBK[..., :-1]), dim=-1)
    earlier_CB1 = (branch_C.unsqueeze(1) > branch_C).unsqueeze(-1)
    rank_RCK = (above_RCBK.bool() & is_node_RCK.unsqueeze(1) & earlier_CB1).sum(2)
    kind_RC1 = torch.bucketize(matched_RC, calibration.boundaries, right=True).unsqueeze(-1)
    cells_RCK = rank_RCK.clamp(max=RANKS - 1) * len(LENGTHS) + kind_RC1
    steps_RCK = calibration.log_rates()[cells_RCK].gather(1, owner_RCK)
    values_RCK = torch.where(is_node_RCK, steps_RCK.cumsum(-1), -torch.inf)
    # Node (c, k) is candidate c * K + k.
    number_RCK = owner_RCK * count + torch.arange(count, device=device)
    parents_RCK = torch.cat((torch.full_like(number_RCK[..., :1], ROOT), number_RCK[..., :-1]), dim=-1)
    return Candidates(
        tokens_RCK.flatten(1), parents_RCK.flatten(1), values_RCK.flatten(1), cells_RCK.flatten(1)
    )
