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

from dataclasses import dataclass

import torch

from paceline.kernels.row_step import Queries, RowTensors
from paceline.kernels.triton_support import (
    launch_next,
    launch_options,
    next_power_of_2,
    tl,
    triton,
    wait_previous,
)


@dataclass(frozen=True)
class TreeKeys:
    """Where the keys of tree nodes lie, for R rows of Q nodes whose root is at position `context`.

    The key of node q's ancestor at position context + d lies in cache slot `slots_RQD[r, q, d]`; from the
    node's own depth on it is its own. Keys before the context are the row's, found through its block table.
    """

    depth_RQ: torch.Tensor
    slots_RQD: torch.Tensor


def gather_tree_reference(
    rows: RowTensors,
    slots_R: torch.Tensor,
    proposals_SK: torch.Tensor,
    parents_SK: torch.Tensor,
    queries: int,
    max_position: int,
    block_size: int,
) -> tuple[Queries, TreeKeys]:
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


@triton.jit
def _gather_tree_kernel(
    slots_ptr,
    tokens_ptr,
    length_ptr,
    limit_ptr,
    active_ptr,
    seed_ptr,
    temperature_ptr,
    table_ptr,
    proposals_ptr,
    parents_ptr,
    out_tokens_ptr,
    out_positions_ptr,
    out_cache_ptr,
    out_context_ptr,
    out_sample_ptr,
    out_seed_ptr,
    out_temperature_ptr,
    out_depth_ptr,
    out_keys_ptr,
    width,
    table_width,
    num_proposals,
    queries,
    max_position,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row."""
    launch_next(PDL)
    wait_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    length, limit = tl.load(length_ptr + slot), tl.load(limit_ptr + slot)
    active = tl.load(active_ptr + slot) != 0
    q = tl.arange(0, BLOCK_Q)
    valid = q < queries
    place = length - 1 + q
    last = tl.load(tokens_ptr + slot * width + length - 1)
    proposed = tl.load(proposals_ptr + slot * num_proposals + q - 1, mask=valid & (q > 0), other=0)
    block = tl.load(table_ptr + slot * table_width + place // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
    stored = (place < limit) & (active != 0)
    cache_slot = tl.where(stored, block * BLOCK_SIZE + place % BLOCK_SIZE, -1)
    # Row n of `keys` is node n's line of the table; a child's is its parent's with its own slot behind.
    depth = q * 0
    own = tl.maximum(cache_slot, 0)
    root = tl.sum(tl.where(q == 0, own, 0), axis=0)
    keys = tl.zeros((BLOCK_Q, BLOCK_Q), tl.int64) + root
    for node in range(1, queries):
        parent = tl.load(parents_ptr + slot * num_proposals + node - 1)
        node_depth = tl.sum(tl.where(q == parent, depth, 0), axis=0) + 1
        line = tl.sum(tl.where((q == parent)[:, None], keys, 0), axis=0)
        line = tl.where(q >= node_depth, tl.sum(tl.where(q == node, own, 0), axis=0), line)
        depth = tl.where(q == node, node_depth, depth)
        keys = tl.where((q == node)[:, None], line[None, :], keys)
    position = length - 1 + depth
    out = row * queries + q
    tl.store(out_tokens_ptr + out, tl.where(q == 0, last, tl.maximum(proposed, 0)), mask=valid)
    tl.store(out_positions_ptr + out, tl.minimum(position, max_position), mask=valid)
    tl.store(out_cache_ptr + out, cache_slot, mask=valid)
    tl.store(out_sample_ptr + out, position + 1, mask=valid)
    tl.store(out_seed_ptr + out, tl.load(seed_ptr + slot) + q * 0, mask=valid)
    tl.store(out_temperature_ptr + out, tl.load(temperature_ptr + slot) + q * 0.0, mask=valid)
    tl.store(out_context_ptr + row, tl.where(active, length - 1, -1))
    tl.store(out_depth_ptr + out, depth.to(tl.int64), mask=valid)
    tl.store(out_keys_ptr + out[:, None] * queries + q[None, :], keys, mask=valid[:, None] & valid[None, :])


def gather_tree_triton(
    rows: RowTensors,
    slots_R: torch.Tensor,
    proposals_SK: torch.Tensor,
    parents_SK: torch.Tensor,
    queries: int,
    max_position: int,
    block_size: int,
) -> tuple[Queries, TreeKeys]:
    num_rows, device = slots_R.shape[0], slots_R.device
    tokens, positions, cache_slots, sample_positions, seed, depth = torch.empty(
        6, num_rows, queries, dtype=torch.int64, device=device
    )
    context_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    temperature = torch.empty(num_rows, queries, dtype=rows.temperature.dtype, device=device)
    key_slots = torch.empty(num_rows, queries, queries, dtype=torch.int64, device=device)
    _gather_tree_kernel[(num_rows,)](
        slots_R,
        rows.tokens,
        rows.length,
        rows.limit,
        rows.active,
        rows.seed,
        rows.temperature,
        rows.block_table,
        proposals_SK,
        parents_SK,
        tokens,
        positions,
        cache_slots,
        context_R,
        sample_positions,
        seed,
        temperature,
        depth,
        key_slots,
        rows.tokens.shape[1],
        rows.block_table.shape[1],
        proposals_SK.shape[1],
        queries,
        max_position,
        BLOCK_SIZE=block_size,
        BLOCK_Q=next_power_of_2(queries),
        **launch_options(num_warps=1),
    )
    gathered = Queries(tokens, positions, cache_slots, context_R, sample_positions, seed, temperature)
    return gathered, TreeKeys(depth, key_slots)


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
    run = gather_tree_triton if slots_R.is_cuda else gather_tree_reference
    return run(rows, slots_R, proposals_SK, parents_SK, queries, max_position, block_size)
