"""From a verified tree to the chain of its path, which is what the rest of a step works on."""

from dataclasses import dataclass

import torch

from paceline.drafting.base import TreeStep
from paceline.engine.proposals import Proposals
from paceline.engine.sampling import Samples
from paceline.kernels.row_step import Queries
from paceline.kernels.tree_walk import TreeWalk, walk_tree


@dataclass(frozen=True)
class Path:
    """The most that each row keeps, by depth; beyond a path's end its last node repeats."""

    sampled_RQ: torch.Tensor
    logprobs_RQ: torch.Tensor
    # The indices of the path's nodes among the T tokens that ran; None: in order.
    way_RQ: torch.Tensor | None = None
    walk: TreeWalk | None = None


def straight_path(queries: Queries, samples: Samples) -> Path:
    shape = queries.tokens_RQ.shape
    return Path(samples.tokens_T.view(shape), samples.logprobs_T.view(shape))


def walked_path(
    slots_R: torch.Tensor, proposals: Proposals, queries: Queries, samples: Samples
) -> tuple[Path, TreeStep]:
    """Returns the samples' path, and the proposer's training data; replaces the proposals by the path."""
    nodes = slots_R, proposals.tokens_SK, proposals.parents_SK
    straight = straight_path(queries, samples)
    walk = walk_tree(*nodes, queries, straight.sampled_RQ, straight.logprobs_RQ)
    index_RQ = torch.arange(samples.tokens_T.numel(), device=slots_R.device).view_as(walk.path_RQ)
    path = Path(walk.sampled_RQ, walk.logprobs_RQ, index_RQ.gather(1, walk.path_RQ), walk)
    return path, TreeStep(slots_R, queries, walk)
