"""From verified nodes to the chain of the path through them, in which form the rest of a step sees it."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from paceline.drafting.base import TreeStep
from paceline.engine.sampling import Samples
from paceline.engine.step_tokens import Proposals, StepTokens
from paceline.kernels.tree_walk import TreeWalk, walk_tree


@dataclass(frozen=True)
class Path:
    """What each row keeps at most, by depth; behind a path's end its last node stands again."""

    sampled_RQ: torch.Tensor
    logprobs_RQ: torch.Tensor
    # Where the path's nodes are among the T tokens that ran; None: row after row.
    way_RQ: torch.Tensor | None = None
    walk: TreeWalk | None = None


def straight_path(tokens: StepTokens, samples: Samples) -> Path:
    """Returns the path of chains that are as they were run."""
    return Path(tokens.by_row(samples.tokens_T), tokens.by_row(samples.logprobs_T))


def walked_path(
    slots_R: torch.Tensor, proposals: Proposals, tokens: StepTokens, samples: Samples
) -> tuple[Path, TreeStep]:
    """Returns the path that samples take, and what the proposer learns from; proposals become the path."""
    verified = replace(tokens.rows, cache_slots_RQ=tokens.verified_RQ)
    nodes = slots_R, proposals.tokens_SK, proposals.parents_SK
    straight = straight_path(tokens, samples)
    walk = walk_tree(*nodes, verified, straight.sampled_RQ, straight.logprobs_RQ)
    index_RQ = tokens.index_RQ
    if index_RQ is None:
        index_RQ = torch.arange(samples.tokens_T.numel(), device=slots_R.device).view_as(walk.path_RQ)
    path = Path(walk.sampled_RQ, walk.logprobs_RQ, index_RQ.gather(1, walk.path_RQ), walk)
    return path, TreeStep(slots_R, tokens.rows, walk, tokens.verified_RQ)


def numbered_path(tokens: StepTokens, walk: TreeWalk) -> torch.Tensor:
    """Returns the path's nodes by the numbers that pacing knows them by, `[R, Q]`; the root is 0.

    That is the node's own, or where rows share, the number that it would have if all rows were alike; there
    the root's place says instead whether the row's own first node follows: 2, or 1 where it does not.
    """
    if tokens.order_RK is None:
        return walk.path_RQ
    numbers_RQ = F.pad(tokens.order_RK + 1, (1, 0)).gather(1, walk.path_RQ)
    numbers_RQ[:, 0] = 1 + (walk.path_RQ[:, 1] == 1)
    return numbers_RQ
