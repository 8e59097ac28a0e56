"""Bugs of trees, and of rows that share the tokens of a step."""

from tests.certify.mutation import Mutant

GATHER = "paceline.kernels.tree_gather:gather_tree_reference"
WALK = "paceline.kernels.tree_walk:walk_tree_reference"
PACKING = "paceline.kernels.packing:pack_queries_reference"

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
    Mutant(
        "what a row did not get is verified all the same",
        PACKING,
        "torch.where(runs_RQ, queries.cache_slots_RQ, -1)",
        "queries.cache_slots_RQ",
        "shared trees",
    ),
    Mutant(
        "shared tokens are sampled with another row's noise",
        PACKING,
        "seed_RQ=packed(queries.seed_RQ)",
        "seed_RQ=packed(queries.seed_RQ.roll(1, 0))",
        "shared chains",
    ),
    Mutant(
        "shared tokens see another row's cache",
        "paceline.kernels.query_tiles:_ragged_tiles",
        "ragged.tokens_R, position_T, block_table_RB)",
        "ragged.tokens_R, position_T, block_table_RB.flip(0))",
        "shared chains",
    ),
]
