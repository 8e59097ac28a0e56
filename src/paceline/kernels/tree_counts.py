"""Counts of walked trees by cell: how many nodes were tried, and how many were right.

A node was tried if its parent was on the path, and right if it was, too. Counts fade, step by step, and a
cell's rate is its share of right ones, beside a first guess that counts like a few nodes. All of it lies on
the device: two launches to count, one for the rates.
"""

import torch

from paceline.kernels.operation import next_power_of_2, reference_of
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous

# Nodes that the first guess counts for.
PRIOR_NODES = 20.0
# What a step leaves of the weight of those before it: about a thousand of them count.
MEMORY = 0.999
# No cell is certain, so a child is always less likely to be reached than its parent.
LOWEST_RATE = 1e-3
HIGHEST_RATE = 0.98

_PRIOR_NODES = tl.constexpr(PRIOR_NODES)
_MEMORY = tl.constexpr(MEMORY)
_LOWEST_RATE = tl.constexpr(LOWEST_RATE)
_HIGHEST_RATE = tl.constexpr(HIGHEST_RATE)


@triton.jit
def _log_rates_kernel(
    prior_ptr, tried_ptr, right_ptr, rates_ptr, num_cells, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):
    """One program."""
    launch_next(PDL)
    wait_previous(PDL)
    cell = tl.arange(0, BLOCK_C)
    mask = cell < num_cells
    right = tl.load(right_ptr + cell, mask=mask, other=0.0)
    tried = tl.load(tried_ptr + cell, mask=mask, other=0.0)
    prior = tl.load(prior_ptr + cell, mask=mask, other=0.5)
    rate = (right + _PRIOR_NODES * prior) / (tried + _PRIOR_NODES)
    rate = tl.minimum(tl.maximum(rate, _LOWEST_RATE), _HIGHEST_RATE)
    tl.store(rates_ptr + cell, tl.log(rate), mask=mask)


@triton.jit(do_not_specialize=["num_queries", "num_proposals", "num_cells"])
def _count_kernel(
    given, fresh_ptr, num_queries, num_proposals, num_cells, BLOCK_Q: tl.constexpr, PDL: tl.constexpr
):
    """One program per row."""
    launch_next(PDL)
    wait_previous(PDL)
    path_ptr, verified_ptr, slots_ptr, parents_ptr, cells_ptr = given
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    node = tl.arange(0, BLOCK_Q)
    exists = node < num_queries
    path = tl.load(path_ptr + row * num_queries + node, mask=exists, other=-1)
    # Nodes other than the root are the proposals.
    proposed = exists & (node > 0)
    proposal = slot * num_proposals + node - 1
    parent = tl.load(parents_ptr + proposal, mask=proposed, other=-2)
    cell = tl.load(cells_ptr + proposal, mask=proposed, other=-1)
    verified = tl.load(verified_ptr + row * num_queries + node, mask=proposed, other=-1)
    own_on_path = tl.max((path[:, None] == node[None, :]).to(tl.int32), axis=0) > 0
    parent_on_path = tl.max((path[:, None] == parent[None, :]).to(tl.int32), axis=0) > 0
    tried = proposed & (cell >= 0) & (verified >= 0) & parent_on_path
    ones = tl.full((BLOCK_Q,), 1.0, tl.float32)
    tl.atomic_add(fresh_ptr + cell, ones, mask=tried, sem="relaxed")
    tl.atomic_add(fresh_ptr + num_cells + cell, ones, mask=tried & own_on_path, sem="relaxed")


@triton.jit
def _fade_kernel(tried_ptr, right_ptr, fresh_ptr, num_cells, BLOCK_C: tl.constexpr, PDL: tl.constexpr):
    """Program 0 for the nodes tried, 1 for the right ones: old counts fade, fresh ones come to them."""
    launch_next(PDL)
    wait_previous(PDL)
    is_right = tl.program_id(0)
    cell = tl.arange(0, BLOCK_C)
    mask = cell < num_cells
    fresh_ptr += is_right * num_cells
    count_ptr = right_ptr if is_right == 1 else tried_ptr
    fresh = tl.load(fresh_ptr + cell, mask=mask, other=0.0)
    count = tl.load(count_ptr + cell, mask=mask, other=0.0)
    tl.store(count_ptr + cell, count * _MEMORY + fresh, mask=mask)
    tl.store(fresh_ptr + cell, tl.zeros_like(fresh), mask=mask)


def log_rates_triton(prior_C, tried_C, right_C):
    out_C = torch.empty_like(prior_C)
    block = next_power_of_2(len(prior_C))
    _log_rates_kernel[(1,)](
        prior_C, tried_C, right_C, out_C, len(prior_C), BLOCK_C=block, **launch_options(num_warps=1)
    )
    return out_C


def count_nodes_triton(path_RQ, verified_RQ, slots_R, parents_SK, cells_SK, tried_C, right_C, fresh_2C):
    (num_rows, num_queries), num_cells = path_RQ.shape, len(tried_C)
    _count_kernel[(num_rows,)](
        (path_RQ, verified_RQ, slots_R, parents_SK, cells_SK),
        fresh_2C,
        num_queries,
        parents_SK.shape[1],
        num_cells,
        BLOCK_Q=next_power_of_2(num_queries),
        **launch_options(num_warps=1),
    )
    block = next_power_of_2(num_cells)
    _fade_kernel[(2,)](tried_C, right_C, fresh_2C, num_cells, BLOCK_C=block, **launch_options(num_warps=1))


@reference_of(log_rates_triton)
def log_rates(prior_C: torch.Tensor, tried_C: torch.Tensor, right_C: torch.Tensor) -> torch.Tensor:
    """Returns the log of every cell's rate, `[C]`."""
    rate_C = (right_C + PRIOR_NODES * prior_C) / (tried_C + PRIOR_NODES)
    return rate_C.clamp(LOWEST_RATE, HIGHEST_RATE).log()


@reference_of(count_nodes_triton)
def count_nodes(
    path_RQ: torch.Tensor,
    verified_RQ: torch.Tensor,
    slots_R: torch.Tensor,
    parents_SK: torch.Tensor,
    cells_SK: torch.Tensor,
    tried_C: torch.Tensor,
    right_C: torch.Tensor,
    fresh_2C: torch.Tensor,
) -> None:
    """Adds a step's trees to the counts of nodes that were tried and of those that were right.

    `path_RQ` are the nodes on each row's path, `verified_RQ` is negative for nodes that the step did not
    verify, and node k + 1 of a row is its slot's proposal k. `fresh_2C` is zero before and after.
    """
    num_queries = path_RQ.shape[1]
    node_Q = torch.arange(num_queries, device=path_RQ.device)
    on_path_RQ = (path_RQ.unsqueeze(2) == node_Q).any(1)
    parents_RK = parents_SK[slots_R, : num_queries - 1]
    cells_RK = cells_SK[slots_R, : num_queries - 1]
    exists_RK = (cells_RK >= 0) & (verified_RQ[:, 1:] >= 0)
    tried_RK = exists_RK & on_path_RQ.gather(1, parents_RK)
    counted = (tried_RK, tried_RK & on_path_RQ[:, 1:])
    cells_N = cells_RK.clamp(min=0).flatten()
    for count_C, fresh_C, seen_RK in zip((tried_C, right_C), fresh_2C, counted, strict=True):
        # Whole numbers, so that the order of the additions does not matter.
        fresh_C.scatter_add_(0, cells_N, seen_RK.flatten().to(fresh_C.dtype))
        count_C.mul_(MEMORY).add_(fresh_C)
        fresh_C.zero_()
