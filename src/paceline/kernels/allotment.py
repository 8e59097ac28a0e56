"""Which proposed tokens a step verifies, where all rows share a number of them.

Every row runs its last token. What is left of the step's tokens goes to the proposals that are likeliest to
be reached, whoever's they are, so a row of which little is expected gets few or none:

    expected     row 0   .9  .8  .6  .3      five to share      row 0   .9  .8  .6
                 row 1   .5  .1                                 row 1   .5
                 row 2   .4  .2                                 row 2   .4

A row's proposals stand in order of their value, so what it gets are its first ones: of a tree a tree. Equal
values go by number, then by row. What does not exist comes last, but it is run where nothing else is there:
the number of tokens is the graph's. One launch.
"""

from dataclasses import dataclass

import torch

from paceline.kernels.row_step import RowTensors
from paceline.kernels.triton_support import (
    launch_next,
    launch_options,
    next_power_of_2,
    tl,
    triton,
    wait_previous,
)

# Rows that a program compares its own with at a time.
COMPARED_ROWS = 16


@dataclass(frozen=True)
class Allotment:
    """What each row runs."""

    # Tokens of each row, its last one included.
    tokens_R: torch.Tensor
    # How many times R proposals of the step are likelier: with n tokens a row to share, those below n run.
    order_RK: torch.Tensor


def allot_tokens_reference(
    rows: RowTensors,
    slots_R: torch.Tensor,
    proposals_SK: torch.Tensor,
    values_SK: torch.Tensor,
    priority_S: torch.Tensor,
    count: int,
    total: int,
) -> Allotment:
    """The reference of `allot_tokens`."""
    num_rows = len(slots_R)
    number_K = torch.arange(count, device=slots_R.device)
    room_R = torch.where(rows.active[slots_R], rows.limit[slots_R] - rows.length[slots_R], 0)
    exists_RK = (proposals_SK[slots_R, :count] >= 0) & (number_K < room_R.unsqueeze(1))
    values_RK = values_SK[slots_R, :count] + priority_S[slots_R].unsqueeze(1)
    values_KR = torch.where(exists_RK, values_RK, -torch.inf).T.flatten()
    best_first = values_KR.sort(descending=True, stable=True).indices
    rank_KR = torch.empty_like(best_first)
    rank_KR[best_first] = torch.arange(len(best_first), device=slots_R.device)
    rank_RK = rank_KR.view(count, num_rows).T
    tokens_R = 1 + (rank_RK < total - num_rows).sum(1)
    return Allotment(tokens_R, (rank_RK // num_rows).contiguous())


@triton.jit
def _proposal_values(
    slot,
    node,
    valid,
    length_ptr,
    limit_ptr,
    active_ptr,
    proposals_ptr,
    values_ptr,
    priority_ptr,
    num_proposals,
):
    """Returns the values of proposals `node` of the rows in `slot`; -inf for what does not exist."""
    room = tl.load(limit_ptr + slot) - tl.load(length_ptr + slot)
    active = tl.load(active_ptr + slot) != 0
    offset = slot * num_proposals + node
    token = tl.load(proposals_ptr + offset, mask=valid, other=-1)
    value = tl.load(values_ptr + offset, mask=valid, other=0.0) + tl.load(priority_ptr + slot)
    return tl.where((token >= 0) & (node < room) & active & valid, value, -float("inf"))


@triton.jit(do_not_specialize=["num_rows", "count", "shared"])
def _allot_kernel(
    slots_ptr,
    length_ptr,
    limit_ptr,
    active_ptr,
    proposals_ptr,
    values_ptr,
    priority_ptr,
    tokens_ptr,
    order_ptr,
    num_proposals,
    num_rows,
    count,
    shared,
    BLOCK_K: tl.constexpr,
    COMPARED_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row: the ranks of its proposals among all."""
    launch_next(PDL)
    wait_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    own_slot = tl.load(slots_ptr + row)
    own = _proposal_values(
        own_slot + k * 0,
        k,
        k < count,
        length_ptr,
        limit_ptr,
        active_ptr,
        proposals_ptr,
        values_ptr,
        priority_ptr,
        num_proposals,
    )
    own_place = k * num_rows + row
    rank = k * 0
    for first in range(0, num_rows, COMPARED_ROWS):
        other_row = first + tl.arange(0, COMPARED_ROWS)
        is_row = other_row < num_rows
        slot = tl.load(slots_ptr + other_row, mask=is_row, other=0)
        valid = is_row[:, None] & (k < count)[None, :]
        other = _proposal_values(
            slot[:, None] + k[None, :] * 0,
            k[None, :] + slot[:, None] * 0,
            valid,
            length_ptr,
            limit_ptr,
            active_ptr,
            proposals_ptr,
            values_ptr,
            priority_ptr,
            num_proposals,
        )
        place = k[None, :] * num_rows + other_row[:, None]
        # [rows, their proposals, own proposals]
        before = (other[:, :, None] > own[None, None, :]) | (
            (other[:, :, None] == own[None, None, :]) & (place[:, :, None] < own_place[None, None, :])
        )
        rank += tl.sum(tl.sum((before & valid[:, :, None]).to(tl.int32), axis=0), axis=0)
    runs = (k < count) & (rank < shared)
    tl.store(tokens_ptr + row, tl.sum(runs.to(tl.int64), axis=0) + 1)
    tl.store(order_ptr + row * count + k, (rank // num_rows).to(tl.int64), mask=k < count)


def allot_tokens_triton(
    rows: RowTensors,
    slots_R: torch.Tensor,
    proposals_SK: torch.Tensor,
    values_SK: torch.Tensor,
    priority_S: torch.Tensor,
    count: int,
    total: int,
) -> Allotment:
    """Launches `allot_tokens`'s kernel."""
    num_rows = len(slots_R)
    tokens_R = torch.empty(num_rows, dtype=torch.int64, device=slots_R.device)
    order_RK = torch.empty(num_rows, count, dtype=torch.int64, device=slots_R.device)
    _allot_kernel[(num_rows,)](
        slots_R,
        rows.length,
        rows.limit,
        rows.active,
        proposals_SK,
        values_SK,
        priority_S,
        tokens_R,
        order_RK,
        proposals_SK.shape[1],
        num_rows,
        count,
        total - num_rows,
        BLOCK_K=next_power_of_2(count),
        COMPARED_ROWS=COMPARED_ROWS,
        **launch_options(num_warps=4),
    )
    return Allotment(tokens_R, order_RK)


def allot_tokens(
    rows: RowTensors,
    slots_R: torch.Tensor,
    proposals_SK: torch.Tensor,
    values_SK: torch.Tensor,
    priority_S: torch.Tensor,
    count: int,
    total: int,
) -> Allotment:
    """Shares `total` tokens among rows of up to `count` proposals each; with all of them there is room.

    `values_SK` are logs of how likely proposals are to be reached, `priority_S` what a row's weigh more.
    """
    num_rows = len(slots_R)
    assert num_rows <= total <= num_rows * (count + 1), (num_rows, count, total)
    run = allot_tokens_triton if slots_R.is_cuda else allot_tokens_reference
    return run(rows, slots_R, proposals_SK, values_SK, priority_S, count, total)
