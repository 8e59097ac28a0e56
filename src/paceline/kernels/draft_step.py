"""What a drafter with layers runs for each row: positions from one before the row's last token on.

    row            .. | L-2 | L-1 |  L  | L+1            L tokens so far
    column               0     1     2     3             position L - 2 + column
    sampled with noise of position   L + column          as the policy will at that position

An eagle head runs token L-1 in column 0, because its entry at t holds token t + 1; a draft model runs tokens
L-2 and L-1 in columns 0 and 1. Everything is laid out by column, so that a column is contiguous. One launch.
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


@dataclass(frozen=True)
class DraftQueries:
    """What a drafter's forward passes and sampler need, for C columns and R rows."""

    # The tokens at L - 2 and L - 1; 0 where a row has only one.
    tokens_2R: torch.Tensor
    # Clamped to the positions that exist.
    positions_CR: torch.Tensor
    # -1: do not store.
    cache_slots_CR: torch.Tensor
    # The position, unclamped; -1: the row is not active, or the position lies before it.
    context_CR: torch.Tensor
    sample_positions_CR: torch.Tensor
    seed_R: torch.Tensor
    temperature_R: torch.Tensor


def gather_draft_reference(
    rows: RowTensors, slots_R: torch.Tensor, columns: int, max_position: int, block_size: int
) -> DraftQueries:
    length_R, active_R = rows.length[slots_R], rows.active[slots_R]
    column_C1 = torch.arange(columns, device=slots_R.device).unsqueeze(1)
    position_CR = length_R - 2 + column_C1
    runs_CR = active_R & (position_CR >= 0)
    stored_CR = runs_CR & (position_CR < rows.limit[slots_R])
    inside_CR = position_CR.clamp(min=0)
    block_CR = rows.block_table[slots_R, inside_CR // block_size].long()
    before_R = torch.where(length_R >= 2, rows.tokens[slots_R, (length_R - 2).clamp(min=0)], 0)
    return DraftQueries(
        tokens_2R=torch.stack((before_R, rows.tokens[slots_R, length_R - 1])),
        positions_CR=inside_CR.clamp(max=max_position),
        cache_slots_CR=torch.where(stored_CR, block_CR * block_size + inside_CR % block_size, -1),
        context_CR=torch.where(runs_CR, position_CR, -1),
        sample_positions_CR=length_R + column_C1,
        seed_R=rows.seed[slots_R],
        temperature_R=rows.temperature[slots_R],
    )


@triton.jit
def _gather_draft_kernel(
    slots_ptr,
    tokens_ptr,
    length_ptr,
    limit_ptr,
    active_ptr,
    seed_ptr,
    temperature_ptr,
    table_ptr,
    out_tokens_ptr,
    out_positions_ptr,
    out_cache_ptr,
    out_context_ptr,
    out_sample_ptr,
    out_seed_ptr,
    out_temperature_ptr,
    width,
    table_width,
    columns,
    num_rows,
    max_position,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row."""
    launch_next(PDL)
    wait_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    length, limit = tl.load(length_ptr + slot), tl.load(limit_ptr + slot)
    active = tl.load(active_ptr + slot) != 0
    column = tl.arange(0, BLOCK_C)
    valid = column < columns
    position = length - 2 + column
    inside = tl.maximum(position, 0)
    runs = (position >= 0) & active
    block = tl.load(table_ptr + slot * table_width + inside // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
    out = column * num_rows + row
    tl.store(out_positions_ptr + out, tl.minimum(inside, max_position), mask=valid)
    tl.store(
        out_cache_ptr + out,
        tl.where(runs & (position < limit), block * BLOCK_SIZE + inside % BLOCK_SIZE, -1),
        mask=valid,
    )
    tl.store(out_context_ptr + out, tl.where(runs, position, -1), mask=valid)
    tl.store(out_sample_ptr + out, length + column, mask=valid)
    before = tl.load(tokens_ptr + slot * width + tl.maximum(length - 2, 0))
    tl.store(out_tokens_ptr + row, tl.where(length >= 2, before, 0))
    tl.store(out_tokens_ptr + num_rows + row, tl.load(tokens_ptr + slot * width + length - 1))
    tl.store(out_seed_ptr + row, tl.load(seed_ptr + slot))
    tl.store(out_temperature_ptr + row, tl.load(temperature_ptr + slot))


def gather_draft_triton(
    rows: RowTensors, slots_R: torch.Tensor, columns: int, max_position: int, block_size: int
) -> DraftQueries:
    num_rows, device = slots_R.shape[0], slots_R.device
    tokens_2R = torch.empty(2, num_rows, dtype=torch.int64, device=device)
    positions, cache_slots, context, sample_positions = torch.empty(
        4, columns, num_rows, dtype=torch.int64, device=device
    )
    seed_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    temperature_R = torch.empty(num_rows, dtype=rows.temperature.dtype, device=device)
    _gather_draft_kernel[(num_rows,)](
        slots_R,
        rows.tokens,
        rows.length,
        rows.limit,
        rows.active,
        rows.seed,
        rows.temperature,
        rows.block_table,
        tokens_2R,
        positions,
        cache_slots,
        context,
        sample_positions,
        seed_R,
        temperature_R,
        rows.tokens.shape[1],
        rows.block_table.shape[1],
        columns,
        num_rows,
        max_position,
        BLOCK_SIZE=block_size,
        BLOCK_C=next_power_of_2(columns),
        **launch_options(num_warps=1),
    )
    return DraftQueries(tokens_2R, positions, cache_slots, context, sample_positions, seed_R, temperature_R)


def gather_draft(
    rows: RowTensors, slots_R: torch.Tensor, columns: int, max_position: int, block_size: int
) -> DraftQueries:
    """Returns the tokens, positions, cache slots and noise that `columns` columns of drafting need."""
    run = gather_draft_triton if slots_R.is_cuda else gather_draft_reference
    return run(rows, slots_R, columns, max_position, block_size)
