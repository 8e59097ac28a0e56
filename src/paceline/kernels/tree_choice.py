"""Which candidates become the nodes of a tree: those that are most likely to be reached, best first.

A child is less likely than its parent, so a chosen node has its parent before it. One launch, which also
writes them where the step looks for its proposals.
"""

from typing import NamedTuple

import torch

from paceline.kernels.operation import next_power_of_2, reference_of
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous

# The parent of candidates that follow the row's last token.
ROOT = -1
_ROOT = tl.constexpr(ROOT)


class Candidates(NamedTuple):
    """Possible nodes of R trees, N each, in any order; siblings differ."""

    # -1: there is none.
    tokens_RN: torch.Tensor
    # The candidates' numbers, or ROOT.
    parents_RN: torch.Tensor
    # The log of how likely a node is to be reached; -inf where there is none.
    values_RN: torch.Tensor
    # The calibration's cells.
    cells_RN: torch.Tensor


class ProposedNodes(NamedTuple):
    """The nodes that each of S slots proposes, K at most, as `tree_gather.py` wants them."""

    # -1: there is none.
    tokens_SK: torch.Tensor
    # Node numbers, from 1 on; 0 is the row's last token.
    parents_SK: torch.Tensor
    # -1 where there is no node.
    cells_SK: torch.Tensor


@triton.jit
def order_by_value(value, number, exists):
    """Returns how many come before each: the better ones, and of equal ones those with a lower number."""
    before = (value[:, None] > value[None, :]) | (
        (value[:, None] == value[None, :]) & (number[:, None] < number[None, :])
    )
    return tl.sum((before & exists[:, None]).to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["num_candidates", "num_proposals", "count"])
def _choose_kernel(
    candidates,
    nodes,
    slots_ptr,
    chosen_ptr,
    num_candidates,
    num_proposals,
    count,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row."""
    launch_next(PDL)
    wait_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    number = tl.arange(0, BLOCK_N)
    exists = number < num_candidates
    value = tl.load(candidates.values_RN + row * num_candidates + number, mask=exists, other=-float("inf"))
    parent = tl.load(candidates.parents_RN + row * num_candidates + number, mask=exists, other=_ROOT)
    token = tl.load(candidates.tokens_RN + row * num_candidates + number, mask=exists, other=-1)
    cell = tl.load(candidates.cells_RN + row * num_candidates + number, mask=exists, other=-1)
    order = order_by_value(value, number, exists)
    is_parent = number[:, None] == parent[None, :]
    node_above = tl.sum(tl.where(is_parent, order[:, None] + 1, 0), axis=0)
    real = value > -float("inf")
    chosen = exists & (order < count)
    out = slot * num_proposals + order
    tl.store(nodes.tokens_SK + out, tl.where(real, token, -1), mask=chosen)
    tl.store(nodes.parents_SK + out, tl.where(real, node_above, 0).to(tl.int64), mask=chosen)
    tl.store(nodes.cells_SK + out, tl.where(real, cell, -1), mask=chosen)
    tl.store(chosen_ptr + row * count + order, number.to(tl.int64), mask=chosen)
    # Where there are fewer candidates than room.
    node = tl.arange(0, BLOCK_K)
    missing = (node >= num_candidates) & (node < count)
    none = tl.full((BLOCK_K,), -1, tl.int64)
    out = slot * num_proposals + node
    tl.store(nodes.tokens_SK + out, none, mask=missing)
    tl.store(nodes.parents_SK + out, none + 1, mask=missing)
    tl.store(nodes.cells_SK + out, none, mask=missing)
    tl.store(chosen_ptr + row * count + node, none + 1, mask=missing)


def choose_nodes_triton(candidates, count, slots_R, nodes):
    num_rows, num_candidates = candidates.tokens_RN.shape
    chosen_RK = torch.empty(num_rows, count, dtype=torch.int64, device=slots_R.device)
    block = next_power_of_2(num_candidates)
    _choose_kernel[(num_rows,)](
        Candidates(*(field.contiguous() for field in candidates)),
        nodes,
        slots_R,
        chosen_RK,
        num_candidates,
        nodes.tokens_SK.shape[1],
        count,
        BLOCK_N=block,
        BLOCK_K=next_power_of_2(count),
        **launch_options(num_warps=1 if block <= 32 else 4),
    )
    return chosen_RK


@reference_of(choose_nodes_triton, lambda candidates: candidates.tokens_RN.is_cuda)
def choose_nodes(
    candidates: Candidates, count: int, slots_R: torch.Tensor, nodes: ProposedNodes
) -> torch.Tensor:
    """Writes the `count` candidates that are most likely to be reached into the rows' slots of `nodes`.

    Returns which candidate each node is, `[R, count]`; nodes that do not exist stand for any.
    """
    room = min(count, candidates.values_RN.shape[1])
    chosen_RK = candidates.values_RN.sort(dim=1, descending=True, stable=True).indices[:, :room]
    values_RK = candidates.values_RN.gather(1, chosen_RK)
    exists_RK = values_RK > -torch.inf
    number_K = torch.arange(1, room + 1, device=chosen_RK.device)
    node_RN = torch.zeros_like(candidates.parents_RN).scatter_(1, chosen_RK, number_K.expand_as(chosen_RK))
    parent_RK = candidates.parents_RN.gather(1, chosen_RK)
    parents_RK = torch.where(exists_RK & (parent_RK != ROOT), node_RN.gather(1, parent_RK.clamp(min=0)), 0)
    tokens_RK = torch.where(exists_RK, candidates.tokens_RN.gather(1, chosen_RK), -1)
    cells_RK = torch.where(exists_RK, candidates.cells_RN.gather(1, chosen_RK), -1)
    for out_SK, chosen, missing in (
        (nodes.tokens_SK, tokens_RK, -1),
        (nodes.parents_SK, parents_RK, 0),
        (nodes.cells_SK, cells_RK, -1),
    ):
        out_SK[slots_R, :room] = chosen.to(out_SK.dtype)
        out_SK[slots_R, room:count] = missing
    return torch.nn.functional.pad(chosen_RK, (0, count - room))
