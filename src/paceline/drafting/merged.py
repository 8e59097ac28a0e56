"""Two drafters' nodes in one tree: what an eagle head grows, and what history knows to follow.

    eagle     a ─ b ─ c        history    a ─ b ─ x        both     a ─ b ─ c
              └─ d                        z                         │   └─ x
                                                                    ├─ d
                                                                    z

What both propose is one node, so siblings differ, and it has a rate of its own: two that agree are right more
often than either. History's continuation of it hangs below it. Both drafters also propose alone, and all
three learn from whoever's trees were walked: they share one calibration.
"""

import torch

from paceline.drafting.base import Drafter, DrafterContext, TreeStep
from paceline.drafting.branches import BRANCH_PRIOR
from paceline.drafting.calibration import Calibration
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.growth import CANDIDATES, GAP_PRIOR
from paceline.drafting.history import HistoryDrafter
from paceline.drafting.tree import TreeProposals
from paceline.kernels.history_index import LENGTHS
from paceline.kernels.tree_choice import ROOT, Candidates
from paceline.kernels.tree_growth import GAPS

# P(the policy samples it) of what both propose, by eagle's rank and by the tokens that history matched.
# Guesses.
AGREED_PRIOR = (
    (0.75, 0.85, 0.92, 0.97),
    (0.4, 0.5, 0.6, 0.7),
    (0.3, 0.4, 0.5, 0.6),
    (0.25, 0.3, 0.4, 0.5),
)
# Where the cells of history's nodes, and of those that both propose, begin behind eagle's.
FIRST_BRANCH = CANDIDATES * GAPS
FIRST_AGREED = FIRST_BRANCH + len(BRANCH_PRIOR) * len(LENGTHS)


def matching_nodes(grown: Candidates, tokens_RCK: torch.Tensor, depth: int) -> torch.Tensor:
    """Returns which grown candidate each token of the branches is, `[R, C, K]`; -1: none has its path."""
    match_RCK = torch.full_like(tokens_RCK, -1)
    above_RC1 = torch.full_like(tokens_RCK[..., :1], ROOT)
    exists_R1N = (grown.tokens_RN >= 0).unsqueeze(1)
    for k in range(min(depth, tokens_RCK.shape[2])):
        same_RCN = (grown.parents_RN.unsqueeze(1) == above_RC1) & exists_R1N
        same_RCN &= grown.tokens_RN.unsqueeze(1) == tokens_RCK[..., k : k + 1]
        found_RC = same_RCN.any(2)
        match_RCK[..., k] = torch.where(found_RC, same_RCN.int().argmax(2), -1)
        # Below what was not found nothing is: no candidate has this parent.
        above_RC1 = torch.where(found_RC, match_RCK[..., k], ROOT - 1).unsqueeze(2)
    return match_RCK


def merged_candidates(
    grown: Candidates, branches: Candidates, count: int, depth: int, log_rates_C: torch.Tensor
) -> Candidates:
    """Returns the nodes of both, the grown ones first; those that are in both only once.

    `branches` has `count` tokens a branch and cells of its own calibration; `depth` is that of the deepest
    grown candidate.
    """
    num_rows, num_grown = grown.tokens_RN.shape
    tokens_RCK = branches.tokens_RN.view(num_rows, -1, count)
    cells_RCK = branches.cells_RN.view_as(tokens_RCK)
    match_RCK = matching_nodes(grown, tokens_RCK, depth)
    agrees_RCK = match_RCK >= 0
    rank_RCK = _of_match(grown.cells_RN, match_RCK) // GAPS
    agreed_RCK = FIRST_AGREED + rank_RCK * len(LENGTHS) + cells_RCK % len(LENGTHS)
    cells_RCK = torch.where(agrees_RCK, agreed_RCK, FIRST_BRANCH + cells_RCK)
    reach_RCK = log_rates_C[cells_RCK].cumsum(2)
    # A grown node that history agrees with; the others stand as they are. Several branches may have it, with
    # rates that differ: the likeliest counts.
    where_RN = match_RCK.clamp(min=0).flatten(1)
    agreed_reach = torch.where(agrees_RCK, reach_RCK, -torch.inf).flatten(1)
    values_RN = grown.values_RN.float().scatter_reduce(1, where_RN, agreed_reach, "amax")
    agreed_cells = torch.where(agrees_RCK, agreed_RCK, -1).flatten(1)
    cells_RN = grown.cells_RN.scatter_reduce(1, where_RN, agreed_cells, "amax")
    # A branch's own node hangs below a grown one where the branch leaves it.
    own_RCK = (branches.values_RN.view_as(tokens_RCK) > -torch.inf) & ~agrees_RCK
    parents_RCK = branches.parents_RN.view_as(tokens_RCK)
    above_RCK = torch.cat((torch.full_like(match_RCK[..., :1], ROOT), match_RCK[..., :-1]), dim=2)
    behind_RCK = torch.where(parents_RCK == ROOT, ROOT, num_grown + parents_RCK)
    parents_RCK = torch.where(above_RCK >= 0, above_RCK, behind_RCK)
    # Less than its parent, whose branch may not be the likeliest that has it.
    fields = (
        (grown.tokens_RN, torch.where(own_RCK, tokens_RCK, -1)),
        (grown.parents_RN, parents_RCK),
        (values_RN, torch.where(own_RCK, reach_RCK, -torch.inf)),
        (cells_RN, cells_RCK),
    )
    return Candidates(*(torch.cat((first, second.flatten(1)), dim=1) for first, second in fields))


def _of_match(x_RN: torch.Tensor, match_RCK: torch.Tensor) -> torch.Tensor:
    return x_RN.gather(1, match_RCK.clamp(min=0).flatten(1)).view_as(match_RCK)


class MergedDrafter(Drafter):
    """Proposes trees of history's branches and an eagle head's candidates; both are drafters beside it."""

    max_tokens = 15
    calibration: Calibration

    def __init__(self, history: HistoryDrafter, eagle: EagleDrafter) -> None:
        self.history = history
        self.eagle = eagle
        self.name = f"{history.name}+{eagle.name}"
        self.shape = eagle.shape

    def bind(self, context: DrafterContext) -> None:
        """Connects it; the two drafters have been connected before."""
        self.context = context
        priors = (*GAP_PRIOR, *BRANCH_PRIOR, *AGREED_PRIOR)
        device = context.proposals_SK.device
        self.calibration = Calibration([rate for rates in priors for rate in rates], device)
        self.calibration.lend(self.eagle.calibration, 0)
        self.calibration.lend(self.history.calibration, FIRST_BRANCH)
        self.trees = TreeProposals(context, self.calibration)

    def propose_tree(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        growth = self.eagle.grow(slots_R, count, truncates)
        branches = self.history.branches(slots_R, count)
        log_rates_C = self.calibration.log_rates()
        merged = merged_candidates(growth.candidates(), branches, count, growth.shape.depth, log_rates_C)
        self.trees.propose(slots_R, merged, count)

    def observe_tree(self, step: TreeStep) -> None:
        self.trees.observe(step)
