"""The way through a verified tree: from the root to a child as long as it is what was sampled at its parent.

    node            0     1     2     3     4         parents  0 0 1 1
    token           -     a     b     c     d
    sampled         a     d     x     y     z         what the policy says behind each node
    path            0  ▶  1  ▶  4                     a is node 1, d behind it is node 4; no node is z
    kept            a     d     z                     what plain decoding would have sampled

Once walked a tree is the chain of its path: `walk_tree` returns samples in the path's order and leaves the
path's tokens as the row's proposals, so all that follows a step is the same for both shapes. Keys and values
of the path lie where their nodes did and must move (`move_slots.py`): from `sources_RQ` to `targets_RQ`.
"""

from typing import NamedTuple

import torch

from paceline.kernels.operation import next_power_of_2, reference_of
from paceline.kernels.row_step import Queries
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous


class TreeWalk(NamedTuple):
    """The path through each row's tree, by depth; behind its end the last node stands again."""

    # The nodes' numbers.
    path_RQ: torch.Tensor
    sampled_RQ: torch.Tensor
    logprobs_RQ: torch.Tensor
    # The cache slots where the path's keys and values lie and where they belong; -1 behind its end.
    sources_RQ: torch.Tensor
    targets_RQ: torch.Tensor
    # The same targets by node; -1 for those that are not on the path.
    node_targets_RQ: torch.Tensor
    # The path's nodes, the root included, and the nodes that existed beside it.
    steps_R: torch.Tensor
    proposed_R: torch.Tensor


@triton.jit
def _walk_kernel(given, out, num_proposals, queries, BLOCK_Q: tl.constexpr, PDL: tl.constexpr):
    """One program per row."""
    launch_next(PDL)
    wait_previous(PDL)
    slots_ptr, proposals_ptr, parents_ptr, cache_slots_ptr, sampled_ptr, logprobs_ptr = given
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    q = tl.arange(0, BLOCK_Q)
    valid = q < queries
    below_root = valid & (q > 0)
    offset = row * queries + q
    token = tl.load(proposals_ptr + slot * num_proposals + q - 1, mask=below_root, other=-1)
    parent = tl.load(parents_ptr + slot * num_proposals + q - 1, mask=below_root, other=-1)
    cache_slot = tl.load(cache_slots_ptr + offset, mask=valid, other=-1)
    sampled = tl.load(sampled_ptr + offset, mask=valid, other=0)
    exists = below_root & (token >= 0) & (cache_slot >= 0)
    node = tl.sum(q * 0, axis=0)
    steps = node + 1
    path = q * 0
    for depth in range(1, queries):
        sample = tl.sum(tl.where(q == node, sampled, 0), axis=0)
        child = tl.max(tl.where(exists & (parent == node) & (token == sample), q, 0), axis=0)
        node = tl.where(child > 0, child, node)
        steps += tl.where(child > 0, 1, 0)
        path = tl.where(q == depth, node, path)
    # Line d of `on_path` picks the node at depth d.
    on_path = path[:, None] == q[None, :]
    walked = q < steps
    path_sampled = tl.sum(tl.where(on_path, sampled[None, :], 0), axis=1)
    # Loaded by node: a sum would make a NaN of any node a NaN of all.
    path_logprobs = tl.load(logprobs_ptr + row * queries + path, mask=valid, other=0.0)
    source = tl.sum(tl.where(on_path, cache_slot[None, :], 0), axis=1)
    tl.store(out.path_RQ + offset, path.to(tl.int64), mask=valid)
    tl.store(out.sampled_RQ + offset, path_sampled, mask=valid)
    tl.store(out.logprobs_RQ + offset, path_logprobs, mask=valid)
    tl.store(out.sources_RQ + offset, tl.where(walked, source, -1), mask=valid)
    target = tl.where(walked, cache_slot, -1)
    tl.store(out.targets_RQ + offset, target, mask=valid)
    node_target = tl.max(tl.where(on_path, target[:, None], -1), axis=0)
    tl.store(out.node_targets_RQ + offset, node_target, mask=valid)
    # Proposal d is what the sample at depth d was taken for.
    chain = tl.where(q + 1 < steps, path_sampled, -1)
    tl.store(proposals_ptr + slot * num_proposals + q, chain, mask=q + 1 < queries)
    tl.store(out.steps_R + row, steps.to(tl.int64))
    tl.store(out.proposed_R + row, tl.sum(exists.to(tl.int64), axis=0))


def walk_tree_triton(slots_R, proposals_SK, parents_SK, queries, sampled_RQ, logprobs_RQ):
    num_rows, num_queries = sampled_RQ.shape
    device = slots_R.device
    path, sampled, sources, targets, node_targets = torch.empty(
        5, num_rows, num_queries, dtype=torch.int64, device=device
    )
    logprobs = torch.empty_like(logprobs_RQ)
    steps_R, proposed_R = torch.empty(2, num_rows, dtype=torch.int64, device=device)
    out = TreeWalk(path, sampled, logprobs, sources, targets, node_targets, steps_R, proposed_R)
    _walk_kernel[(num_rows,)](
        (slots_R, proposals_SK, parents_SK, queries.cache_slots_RQ, sampled_RQ, logprobs_RQ),
        out,
        proposals_SK.shape[1],
        num_queries,
        BLOCK_Q=next_power_of_2(num_queries),
        **launch_options(num_warps=1),
    )
    return out


@reference_of(walk_tree_triton)
def walk_tree(
    slots_R: torch.Tensor,
    proposals_SK: torch.Tensor,
    parents_SK: torch.Tensor,
    queries: Queries,
    sampled_RQ: torch.Tensor,
    logprobs_RQ: torch.Tensor,
) -> TreeWalk:
    """Returns the way through each row's tree and rewrites its proposals as the chain that lies on it."""
    num_rows, num_queries = sampled_RQ.shape
    number_K = torch.arange(1, num_queries, device=slots_R.device)
    token_RK = proposals_SK[slots_R, : num_queries - 1]
    parent_RK = parents_SK[slots_R, : num_queries - 1]
    exists_RK = (token_RK >= 0) & (queries.cache_slots_RQ[:, 1:] >= 0)
    path_RQ = torch.zeros_like(sampled_RQ)
    chain_RK = torch.full_like(token_RK, -1)
    node_R1 = torch.zeros(num_rows, 1, dtype=torch.int64, device=slots_R.device)
    steps_R = torch.ones(num_rows, dtype=torch.int64, device=slots_R.device)
    for depth in range(1, num_queries):
        sample_R1 = sampled_RQ.gather(1, node_R1)
        follows_RK = exists_RK & (parent_RK == node_R1) & (token_RK == sample_R1)
        child_R1 = torch.where(follows_RK, number_K, 0).amax(1, keepdim=True)
        node_R1 = torch.where(child_R1 > 0, child_R1, node_R1)
        path_RQ[:, depth] = node_R1.squeeze(1)
        chain_RK[:, depth - 1] = torch.where(child_R1 > 0, sample_R1, -1).squeeze(1)
        steps_R += child_R1.squeeze(1) > 0
    proposals_SK[slots_R, : num_queries - 1] = chain_RK
    walked_RQ = torch.arange(num_queries, device=slots_R.device) < steps_R.unsqueeze(1)
    targets_RQ = torch.where(walked_RQ, queries.cache_slots_RQ, -1)
    # Behind the path's end its last node stands again: the largest is the one that is not -1.
    node_targets_RQ = torch.full_like(targets_RQ, -1).scatter_reduce_(1, path_RQ, targets_RQ, "amax")
    return TreeWalk(
        path_RQ,
        sampled_RQ.gather(1, path_RQ),
        logprobs_RQ.gather(1, path_RQ),
        torch.where(walked_RQ, queries.cache_slots_RQ.gather(1, path_RQ), -1),
        targets_RQ,
        node_targets_RQ,
        steps_R,
        exists_RK.sum(1),
    )
