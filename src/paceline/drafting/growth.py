"""How a drafter with logits grows a tree: one pass of its layers per depth.

    depth 0     root                          one pass: CANDIDATES children
    depth 1     a    b    c    d              the few likeliest to be reached are run: one pass
    depth 2     a' a" ..  b' b" ..            and so on; at the end the likeliest of all are proposed

Candidates are the best of draft logits / T + gumbel(seed, position, token), with the noise that the policy
will sample with (`kernels/candidates.py`). How likely each is follows from how close their scores lie: by its
rank, and by how far it is behind the first, or the second behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.drafting.base import DrafterContext
from paceline.drafting.calibration import Calibration
from paceline.drafting.tree import ROOT, Candidates
from paceline.kernels.candidates import best_candidates
from paceline.kernels.draft_step import DraftQueries
from paceline.kernels.rejection import Truncation
from paceline.kernels.tree_gather import TreeKeys

# Children that a node may get.
CANDIDATES = 4
# Boundaries of the gaps between scores that are told apart; in units of score, which are nats.
GAP_BOUNDARIES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.5)
# What a pass of an EAGLE-3 head takes, in steps of the policy that verify: 0.20 of 4.6 ms at 8B cost (H200).
PASS_COST = 0.045
# P(the policy samples it) by rank and gap, for the first rank the gap to the second. Simulated: 2,000 tokens
# with normal logits of deviation 2.6 and a draft that is off by a deviation of 0.9 (total variation 0.33).
GAP_PRIOR = (
    (0.32, 0.44, 0.55, 0.70, 0.82, 0.92, 0.98, 0.98),
    (0.27, 0.28, 0.17, 0.15, 0.07, 0.04, 0.01, 0.01),
    (0.22, 0.15, 0.15, 0.09, 0.05, 0.02, 0.01, 0.01),
    (0.17, 0.12, 0.11, 0.07, 0.04, 0.01, 0.01, 0.01),
)


@dataclass(frozen=True)
class TreeShape:
    """How many nodes of each depth are run: `widths[d]` of depth d + 1. Their children are one depth more."""

    # Nodes of one depth that are run at most, in any shape.
    WIDEST: ClassVar[int] = 3
    # A pass of the drafter costs as much at any depth, and few trees reach the last ones.
    DEEPEST: ClassVar[int] = 7
    # Depths that have as many candidates as any tree has nodes.
    SHALLOWEST: ClassVar[int] = 2

    widths: tuple[int, ...]

    @classmethod
    def of(cls, nodes: int, deepest: int = DEEPEST) -> "TreeShape":
        """Returns the shape for a tree of so many nodes: deeper, and wider near the root, the more they are.

        A small one is as deep as the chain of its nodes, so that it can be that chain where the drafter is
        nearly always right; none is deeper than `deepest`. What is run lies behind the root in the drafter's
        cache, so it is no more than the nodes of the tree, which have blocks.
        """
        depth = min(nodes, deepest)
        widest = min(1 + (nodes >= 5) + (nodes >= 12), cls.WIDEST)
        widths = [max(1, widest - level // 2) for level in range(depth - 1)]
        while sum(widths) > nodes:
            wide = max(level for level, width in enumerate(widths) if width > 1)
            widths[wide] -= 1
        return cls(tuple(widths))

    @property
    def depth(self) -> int:
        """The depth of the deepest candidates."""
        return len(self.widths) + 1

    @property
    def places(self) -> int:
        """Nodes that are run, with the root."""
        return 1 + sum(self.widths)


def depth_that_pays(accepted_at: Sequence[float]) -> int:
    """Returns how deep a head's trees should be, of whose chains these shares were accepted up to each place.

    The depth with the most tokens for its time; beyond what was measured the last rate goes on. None given:
    the deepest.
    """
    if len(accepted_at) < 2:
        return TreeShape.DEEPEST
    *_, before, last = accepted_at
    rate = min(1.0, last / before) if before > 0 else 0.0
    more = (last * rate**places for places in range(1, TreeShape.DEEPEST))
    reached = [*accepted_at, *more][: TreeShape.DEEPEST]
    return max(
        range(TreeShape.SHALLOWEST, TreeShape.DEEPEST + 1),
        key=lambda depth: (1 + sum(reached[:depth])) / (1 + PASS_COST * depth),
    )


class GapCalibration(Calibration):
    """How often candidates are right, by rank and gap."""

    def __init__(self, device: torch.device) -> None:
        super().__init__([rate for rates in GAP_PRIOR for rate in rates], device)
        self.boundaries = torch.tensor(GAP_BOUNDARIES, device=device)

    def cells(self, scores_TM: torch.Tensor) -> torch.Tensor:
        """Returns the cells of candidates with these scores, best first."""
        gaps_TM = scores_TM[:, :1] - scores_TM
        gaps_TM[:, 0] = gaps_TM[:, 1]
        # Where there is only one candidate the gap is infinite; where there is none it is no number.
        bins_TM = torch.bucketize(gaps_TM.nan_to_num(nan=0.0).float(), self.boundaries)
        rank_M = torch.arange(scores_TM.shape[1], device=scores_TM.device)
        return rank_M * (len(GAP_BOUNDARIES) + 1) + bins_TM


@dataclass(frozen=True)
class Expanded:
    """The nodes of one depth that the drafter runs next, W for each of R rows."""

    depth: int
    tokens_RW: torch.Tensor
    # Which of the nodes that were run before each one follows.
    parents_RW: torch.Tensor

    @property
    def width(self) -> int:
        """How many there are for each row."""
        return self.tokens_RW.shape[1]


class TreeGrowth:
    """The candidates of growing trees, R of them."""

    def __init__(
        self,
        shape: TreeShape,
        context: DrafterContext,
        slots_R: torch.Tensor,
        queries: DraftQueries,
        calibration: GapCalibration,
        truncates: bool,
    ) -> None:
        rows = context.rows
        self.shape = shape
        self.queries = queries
        self.calibration = calibration
        self.log_rates_C = calibration.log_rates()
        self.truncation = (
            Truncation(rows.top_k[slots_R], rows.top_p[slots_R], rows.min_p[slots_R]) if truncates else None
        )
        self.levels: list[Candidates] = []
        # Of each level's candidates: where its keys lie in the drafter's cache, behind the root; -1: nowhere.
        self.places: list[torch.Tensor] = []
        # The nodes that were run last: their numbers among the candidates, and their values.
        self.last_RW = torch.full((len(slots_R), 1), ROOT, device=slots_R.device)
        self.last_values_RW = torch.zeros(len(slots_R), 1, device=slots_R.device)

    def branch(self, logits_TV: torch.Tensor) -> Expanded | None:
        """Adds the children of the nodes that were run last, whose logits these are, `[R x W, V]`.

        Returns the nodes to run next; None: the tree is deep enough.
        """
        num_rows, width = self.last_RW.shape
        depth = len(self.levels)
        tokens_TM, scores_TM = self._best(logits_TV, width, depth)
        cells_TM = self.calibration.cells(scores_TM)
        rates_TM = torch.where(tokens_TM >= 0, self.log_rates_C[cells_TM], -torch.inf)
        values_RWM = self.last_values_RW.unsqueeze(2) + rates_TM.view(num_rows, width, -1)
        level = Candidates(
            tokens_TM.view(num_rows, -1),
            self.last_RW.repeat_interleave(CANDIDATES, dim=1),
            values_RWM.flatten(1),
            cells_TM.view(num_rows, -1),
        )
        first = sum(other.tokens_RN.shape[1] for other in self.levels)
        self.levels.append(level)
        self.places.append(torch.full_like(level.tokens_RN, -1))
        if len(self.levels) == self.shape.depth:
            return None
        next_width = self.shape.widths[depth]
        values_RW, picked_RW = level.values_RN.topk(next_width, dim=1)
        used = 1 + sum(self.shape.widths[:depth])
        place_W = used + torch.arange(next_width, device=picked_RW.device)
        self.places[-1].scatter_(1, picked_RW, place_W.expand_as(picked_RW))
        self.last_RW, self.last_values_RW = first + picked_RW, values_RW
        tokens_RW = level.tokens_RN.gather(1, picked_RW).clamp(min=0)
        return Expanded(depth + 1, tokens_RW, picked_RW // CANDIDATES)

    def candidates(self) -> Candidates:
        """Returns all candidates."""
        fields = zip(
            *((c.tokens_RN, c.parents_RN, c.values_RN, c.cells_RN) for c in self.levels), strict=True
        )
        return Candidates(*(torch.cat(field, dim=1) for field in fields))

    def places_RN(self) -> torch.Tensor:
        """Returns where each candidate's keys lie in the drafter's cache, behind the root; -1: nowhere."""
        return torch.cat(self.places, dim=1)

    def _best(self, logits_TV: torch.Tensor, width: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = self.queries.temperature_R, self.queries.seed_R, self.queries.sample_positions_CR[depth]
        cut = self.truncation
        if width > 1:
            noise = tuple(x.repeat_interleave(width) for x in noise)
            if cut is not None:
                per_row = cut.top_k_R, cut.top_p_R, cut.min_p_R
                cut = Truncation(*(x.repeat_interleave(width) for x in per_row))
        return best_candidates(logits_TV, *noise, CANDIDATES, cut)


class ExpandedKeys:
    """Where the keys of the nodes on each path lie in a drafter's own cache, as the tree is run."""

    def __init__(self, place_slots_CR: torch.Tensor) -> None:
        """`place_slots_CR` are the cache slots of places 0, the root, to C - 1; -1: there is none."""
        self.place_slots_CR = place_slots_CR
        self.slots_RWD = place_slots_CR[0].view(-1, 1, 1)
        self.used = 1

    def deepen(self, parents_RW: torch.Tensor) -> tuple[torch.Tensor, TreeKeys]:
        """Goes one depth down and returns the nodes' own slots and all their keys."""
        width, depth = parents_RW.shape[1], self.slots_RWD.shape[2]
        own_RW = self.place_slots_CR[self.used : self.used + width].T
        self.used += width
        above_RWD = self.slots_RWD.gather(1, parents_RW.unsqueeze(2).expand(-1, -1, depth))
        self.slots_RWD = torch.cat((above_RWD, own_RW.unsqueeze(2)), dim=2)
        depth_RW = torch.full_like(parents_RW, depth)
        return own_RW.contiguous(), TreeKeys(depth_RW, self.slots_RWD.clamp(min=0))
