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
from paceline.drafting.logits import DraftLogits
from paceline.kernels.draft_step import DraftQueries
from paceline.kernels.rejection import Truncation
from paceline.kernels.tree_choice import Candidates
from paceline.kernels.tree_growth import (
    MAX_WIDTH,
    DraftPlaces,
    FoundNodes,
    RunNodes,
    grow_level,
)

# Children that a node may get.
CANDIDATES = 4
# What a pass of an EAGLE-3 head takes, in steps of the policy that verify: 0.16 of 4.6 ms at 8B cost (H200).
PASS_COST = 0.035
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
    WIDEST: ClassVar[int] = MAX_WIDTH
    # A pass of the drafter costs as much at any depth, and few trees reach the last ones,
    DEEPEST: ClassVar[int] = 7
    # unless the drafter is known to be right that often.
    LIMIT: ClassVar[int] = 12
    # Depths that have as many candidates as any tree has nodes.
    SHALLOWEST: ClassVar[int] = 2

    widths: tuple[int, ...]

    @classmethod
    def of(cls, nodes: int, deepest: int = DEEPEST) -> "TreeShape":
        """Returns the shape for a tree of so many nodes: deeper, and wider near the root, the more they are.

        A small one is as deep as the chain of its nodes, so that it can be that chain where the drafter is
        nearly always right; none is deeper than `deepest`. What is run lies behind the root in the drafter's
        cache, so it is no more than the nodes of the tree, which have blocks; and no fewer, since a pass
        reads its weights once for all of them, and the more are run the better candidates there are.
        """
        levels = min(nodes, deepest) - 1
        spread = min(nodes, levels * cls.WIDEST)
        return cls(tuple((spread + levels - 1 - level) // levels for level in range(levels)))

    @property
    def places(self) -> int:
        """Nodes that are run, with the root."""
        return 1 + sum(self.widths)


def depth_that_pays(accepted_at: Sequence[float]) -> int:
    """Returns how deep a head's trees should be, of whose chains these shares were accepted up to each place.

    The depth with the most tokens for its time; beyond what was measured the last rate is assumed. Where
    nothing is known it is TreeShape.DEEPEST.
    """
    if len(accepted_at) < 2:
        return TreeShape.DEEPEST
    *_, before, last = accepted_at
    rate = min(1.0, last / before) if before > 0 else 0.0
    more = (last * rate**places for places in range(1, TreeShape.LIMIT))
    reached = [*accepted_at, *more][: TreeShape.LIMIT]
    return max(
        range(TreeShape.SHALLOWEST, TreeShape.LIMIT + 1),
        key=lambda depth: (1 + sum(reached[:depth])) / (1 + PASS_COST * depth),
    )


class GapCalibration(Calibration):
    """How often candidates are right, by rank and gap."""

    def __init__(self, device: torch.device) -> None:
        super().__init__([rate for rates in GAP_PRIOR for rate in rates], device)


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
        root_column: int = 0,
    ) -> None:
        """`root_column` is the column of the queries that the drafter runs the root in."""
        rows = context.rows
        self.shape = shape
        self.queries = queries
        self.places = DraftPlaces(queries.positions_CR[root_column:], queries.cache_slots_CR[root_column:])
        self.log_rates_C = calibration.log_rates()
        self.truncation = (
            Truncation(rows.top_k[slots_R], rows.top_p[slots_R], rows.min_p[slots_R]) if truncates else None
        )
        self.found = FoundNodes.empty(len(slots_R), CANDIDATES * shape.places, slots_R.device)
        # The nodes that were run last; None: the roots.
        self.last: RunNodes | None = None

    def branch(self, logits: DraftLogits) -> RunNodes | None:
        """Adds the children of the nodes that were run last, R x W of them, whose logits these are.

        Returns the nodes to run next; None: the tree is deep enough.
        """
        depth = 0 if self.last is None else self.last.depth
        width = 1 if self.last is None else self.last.width
        used = 1 + sum(self.shape.widths[:depth])
        following = self.shape.widths[depth] if depth < len(self.shape.widths) else 0
        noise = self.queries.temperature_R, self.queries.seed_R, self.queries.sample_positions_CR[depth]
        best = logits.best(noise, CANDIDATES, self.truncation, width)
        self.last = grow_level(
            *best,
            self.log_rates_C,
            self.last,
            self.found,
            CANDIDATES * (used - width),
            self.places,
            used,
            following,
        )
        return self.last

    def candidates(self) -> Candidates:
        return self.found.candidates

    def places_RN(self) -> torch.Tensor:
        """Returns where each candidate's keys lie in the drafter's cache, behind the root; -1: nowhere."""
        return self.found.places_RN
