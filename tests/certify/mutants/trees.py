"""Bugs of trees."""

from tests.certify.mutation import Mutant

GATHER = "paceline.kernels.tree_gather:gather_tree"
WALK = "paceline.kernels.tree_walk:walk_tree"

MUTANTS = [
    Mutant(
        "a node attends to its sibling",
        GATHER,
        "torch.where(own_RD, node, path_RQD[row_R, parent_R])",
        "torch.where(own_RD, max(node - 1, 1), path_RQD[row_R, parent_R])",
        "trees",
    ),
    Mutant(
        "a path's keys stay where its nodes were",
        WALK,
        "torch.where(walked_RQ, queries.cache_slots_RQ.gather(1, path_RQ), -1)",
        "torch.where(walked_RQ, queries.cache_slots_RQ, -1)",
        "trees",
    ),
    Mutant(
        "a child is taken from the wrong parent",
        WALK,
        "(parent_RK == node_R1) & (token_RK == sample_R1)",
        "(token_RK == sample_R1)",
        "trees",
    ),
    Mutant(
        "a node is sampled with its parent's noise",
        GATHER,
        "sample_positions_RQ=position_RQ + 1",
        "sample_positions_RQ=position_RQ + (depth_RQ == 0)",
        "trees",
    ),
]
