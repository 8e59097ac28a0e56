"""What a row runs to verify a tree: its last token and K proposed nodes, each behind the tokens on its path.

Node 0 is the row's last token; node i > 0 has token `proposals[i - 1]` and parent `parents[i - 1]`, a node
before it. A node's keys and values lie where its number says, behind those of node 0, and its position in the
text is that of its depth:

    node            0     1     2     3     4          parents  0 0 1 1
    lies at        L-1    L    L+1   L+2   L+3         in the row's blocks
    position       L-1    L     L    L+1   L+1
    keys at L, L+1        1     2    1,3   1,4         found through `TreeKeys.slots_RQD`

A proposal of -1 is no node. Nor is one that would lie past the row's limit, where it has no block; children
lie behind their parents, so a node that exists has all its ancestors. One launch.
"""

import torch

from paceline.kernels.operation import reference_of
from paceline.kernels.row_step import Queries, RowTensors, TreeKeys, launch_gather


@reference_of(launch_gather)
def gather_tree(
    rows: RowTensors,
    slots_R: torch.Tensor,
    proposals_SK: torch.Tensor,
    parents_SK: torch.Tensor,
    queries: int,
    max_position: int,
    block_size: int,
) -> tuple[Queries, TreeKeys]:
    """Returns each row's last token and first `queries - 1` nodes, and where their ancestors' keys lie."""
    device = slots_R.device
    length_R, active_R, limit_R = rows.length[slots_R], rows.active[slots_R], rows.limit[slots_R]
    node_Q = torch.arange(queries, device=device)
    place_RQ = (length_R - 1).unsqueeze(1) + node_Q
    block_RQ = rows.block_table[slots_R.unsqueeze(1), place_RQ // block_size].long()
    stored_RQ = active_R.unsqueeze(1) & (place_RQ < limit_R.unsqueeze(1))
    cache_slots_RQ = torch.where(stored_RQ, block_RQ * block_size + place_RQ % block_size, -1)
    depth_RQ = torch.zeros_like(place_RQ)
    path_RQD = torch.zeros(len(slots_R), queries, queries, dtype=torch.int64, device=device)
    row_R = torch.arange(len(slots_R), device=device)
    for node in range(1, queries):
        parent_R = parents_SK[slots_R, node - 1]
        depth_RQ[:, node] = depth_RQ[row_R, parent_R] + 1
        own_RD = node_Q >= depth_RQ[:, node].unsqueeze(1)
        path_RQD[:, node] = torch.where(own_RD, node, path_RQD[row_R, parent_R])
    last_R1 = rows.tokens[slots_R, length_R - 1].unsqueeze(1)
    position_RQ = (length_R - 1).unsqueeze(1) + depth_RQ
    gathered = Queries(
        tokens_RQ=torch.cat((last_R1, proposals_SK[slots_R, : queries - 1].clamp(min=0)), dim=1),
        positions_RQ=position_RQ.clamp(max=max_position),
        cache_slots_RQ=cache_slots_RQ,
        context_R=torch.where(active_R, length_R - 1, -1),
        sample_positions_RQ=position_RQ + 1,
        seed_RQ=rows.seed[slots_R].unsqueeze(1).expand(-1, queries).contiguous(),
        temperature_RQ=rows.temperature[slots_R].unsqueeze(1).expand(-1, queries).contiguous(),
    )
    key_slots_RQD = cache_slots_RQ.clamp(min=0).gather(1, path_RQD.flatten(1)).view(path_RQD.shape)
    return gathered, TreeKeys(depth_RQ, key_slots_RQD)
