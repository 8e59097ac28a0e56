"""From a verified tree to the chain of its path, in which form the rest of a step sees it."""

from dataclasses import replace

import torch

from paceline.engine.sampling import Samples
from paceline.kernels.row_step import Queries
from paceline.kernels.tree_walk import TreeWalk
from paceline.paged.forward import Captured


def along_path(
    walk: TreeWalk, queries: Queries, samples: Samples, captured: Captured
) -> tuple[Queries, Samples, Captured]:
    """Returns what a step ran and computed in the order of each row's path.

    Behind a path's end its last node stands again, with no cache slot.
    """
    num_rows, num_queries = walk.path_RQ.shape
    first_R = torch.arange(num_rows, device=walk.path_RQ.device) * num_queries
    node_T = (first_R.unsqueeze(1) + walk.path_RQ).flatten()

    def of_path(x_T: torch.Tensor) -> torch.Tensor:
        return x_T.index_select(0, node_T)

    path_queries = replace(
        queries,
        tokens_RQ=queries.tokens_RQ.gather(1, walk.path_RQ),
        positions_RQ=queries.positions_RQ.gather(1, walk.path_RQ),
        cache_slots_RQ=walk.targets_RQ,
        sample_positions_RQ=queries.sample_positions_RQ.gather(1, walk.path_RQ),
    )
    path_samples = Samples(
        walk.sampled_RQ.flatten(),
        walk.logprobs_RQ.flatten(),
        *(None if x is None else of_path(x) for x in (samples.top_values_TN, samples.top_tokens_TN)),
    )
    return path_queries, path_samples, {layer: of_path(x_TE) for layer, x_TE in captured.items()}
