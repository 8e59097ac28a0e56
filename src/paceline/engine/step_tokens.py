"""The tokens that a step runs: of every row as many, or as many as it gets of those that all rows share.

    each row alike     R x Q tokens                               `kernels/row_step.py`, `tree_gather.py`
    shared             T tokens, row after row, some with none    `kernels/allotment.py`, `packing.py`

Whoever looks at single tokens takes them as they come; `by_row` brings what was computed for them back into
rows of Q, where what a row did not run stands for its first token and has no cache slot.
"""

from dataclasses import dataclass

import torch

from paceline.kernels.allotment import allot_tokens
from paceline.kernels.packing import RaggedRows, pack_queries
from paceline.kernels.row_step import Queries, RowTensors, gather_queries
from paceline.kernels.tree_gather import TreeKeys, gather_tree
from paceline.paged.cache import BLOCK_SIZE


@dataclass(frozen=True)
class StepShape:
    """How many tokens a step runs, and how they hang together."""

    rows: int
    # Of one row at most, its last one included.
    num_queries: int
    # Of all rows, where they share; 0: each runs `num_queries`.
    total: int = 0
    tree: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return self.total or self.rows * self.num_queries

    @property
    def mean_queries(self) -> int:
        """Tokens of a row on average, rounded up."""
        return -(-self.tokens // self.rows)


@dataclass(frozen=True)
class Proposals:
    """Where drafters leave what they propose, for every slot."""

    tokens_SK: torch.Tensor
    # Of a tree's nodes, the parents.
    parents_SK: torch.Tensor
    # The logs of how likely each is to be reached, and what those of a slot's row weigh more.
    values_SK: torch.Tensor
    priority_S: torch.Tensor

    @classmethod
    def empty(cls, num_slots: int, count: int, device: torch.device) -> "Proposals":
        """Makes room for `count` tokens in each slot."""
        tokens_SK = torch.zeros(num_slots, count, dtype=torch.int64, device=device)
        values_SK = torch.zeros(num_slots, count, dtype=torch.float32, device=device)
        return cls(tokens_SK, torch.zeros_like(tokens_SK), values_SK, values_SK.new_zeros(num_slots))


@dataclass(frozen=True)
class StepTokens:
    """The tokens of one step."""

    # In rows of Q, whether run or not.
    rows: Queries
    # As they are run, `[R, Q]` or `[T, 1]`.
    queries: Queries
    keys: TreeKeys | None
    # The slot of each line of `queries`.
    slots: torch.Tensor
    # The rows' cache slots, -1 where nothing is verified.
    verified_RQ: torch.Tensor
    ragged: RaggedRows | None = None
    # Where R x Q tokens are among the T, and the other way round; None: they are the same.
    index_RQ: torch.Tensor | None = None
    source_T: torch.Tensor | None = None
    # The order of proposals in which they were shared.
    order_RK: torch.Tensor | None = None

    def by_row(self, x_T: torch.Tensor) -> torch.Tensor:
        """Returns what was computed for each token in rows of Q."""
        if self.index_RQ is None:
            return x_T.view(*self.verified_RQ.shape, *x_T.shape[1:])
        return x_T[self.index_RQ]

    def by_token(self, x_RQ: torch.Tensor) -> torch.Tensor:
        """Returns what is known by row for each token that is run."""
        return x_RQ.flatten() if self.source_T is None else x_RQ.flatten()[self.source_T]


def step_tokens(
    state: RowTensors, slots_R: torch.Tensor, proposals: Proposals, shape: StepShape, max_position: int
) -> StepTokens:
    """Returns what the rows in `slots_R` run: their last tokens and what was proposed behind them."""
    sizes = shape.num_queries, max_position, BLOCK_SIZE
    keys = None
    if shape.tree:
        rows, keys = gather_tree(state, slots_R, proposals.tokens_SK, proposals.parents_SK, *sizes)
    else:
        rows = gather_queries(state, slots_R, proposals.tokens_SK, *sizes)
    if not shape.total:
        return StepTokens(rows, rows, keys, slots_R, rows.cache_slots_RQ)
    values = proposals.tokens_SK, proposals.values_SK, proposals.priority_S
    allotment = allot_tokens(state, slots_R, *values, shape.num_queries - 1, shape.total)
    packed = pack_queries(slots_R, rows, keys, allotment.tokens_R, shape.total)
    return StepTokens(
        rows,
        packed.queries,
        packed.tree,
        packed.slots_T,
        packed.cache_slots_RQ,
        packed.ragged,
        packed.index_RQ,
        packed.source_T,
        allotment.order_RK,
    )
