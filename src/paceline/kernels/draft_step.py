"""What a drafter with layers runs for each row: positions from one before the row's last token on.

    row            .. | L-2 | L-1 |  L  | L+1            L tokens so far
    column               0     1     2     3             position L - 2 + column
    sampled with noise of position   L + column          as the policy will at that position

An eagle head runs token L-1 in column 0, because its entry at t holds token t + 1; a draft model runs tokens
L-2 and L-1 in columns 0 and 1. Everything is laid out by column, so that a column is contiguous. One launch.
"""

from typing import NamedTuple

import torch

from paceline.kernels.operation import next_power_of_2, reference_of
from paceline.kernels.row_step import RowTensors
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous


class DraftQueries(NamedTuple):
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


@triton.jit
def _gather_draft_kernel(
    rows, slots_ptr, out, sizes, BLOCK_SIZE: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):
    """One program per row."""
    launch_next(PDL)
    wait_previous(PDL)
    width, table_width, columns, num_rows, max_position = sizes
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    length, limit = tl.load(rows.length + slot), tl.load(rows.limit + slot)
    active = tl.load(rows.active + slot) != 0
    column = tl.arange(0, BLOCK_C)
    valid = column < columns
    position = length - 2 + column
    inside = tl.maximum(position, 0)
    runs = (position >= 0) & active
    block = tl.load(rows.block_table + slot * table_width + inside // BLOCK_SIZE, mask=valid, other=0).to(
        tl.int64
    )
    at = column * num_rows + row
    tl.store(out.positions_CR + at, tl.minimum(inside, max_position), mask=valid)
    tl.store(
        out.cache_slots_CR + at,
        tl.where(runs & (position < limit), block * BLOCK_SIZE + inside % BLOCK_SIZE, -1),
        mask=valid,
    )
    tl.store(out.context_CR + at, tl.where(runs, position, -1), mask=valid)
    tl.store(out.sample_positions_CR + at, length + column, mask=valid)
    before = tl.load(rows.tokens + slot * width + tl.maximum(length - 2, 0))
    tl.store(out.tokens_2R + row, tl.where(length >= 2, before, 0))
    tl.store(out.tokens_2R + num_rows + row, tl.load(rows.tokens + slot * width + length - 1))
    tl.store(out.seed_R + row, tl.load(rows.seed + slot))
    tl.store(out.temperature_R + row, tl.load(rows.temperature + slot))


def gather_draft_triton(rows, slots_R, columns, max_position, block_size):
    num_rows, device = slots_R.shape[0], slots_R.device
    tokens_2R = torch.empty(2, num_rows, dtype=torch.int64, device=device)
    positions, cache_slots, context, sample_positions = torch.empty(
        4, columns, num_rows, dtype=torch.int64, device=device
    )
    seed_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    temperature_R = torch.empty(num_rows, dtype=rows.temperature.dtype, device=device)
    out = DraftQueries(tokens_2R, positions, cache_slots, context, sample_positions, seed_R, temperature_R)
    _gather_draft_kernel[(num_rows,)](
        rows,
        slots_R,
        out,
        (rows.tokens.shape[1], rows.block_table.shape[1], columns, num_rows, max_position),
        BLOCK_SIZE=block_size,
        BLOCK_C=next_power_of_2(columns),
        **launch_options(num_warps=1),
    )
    return out


@reference_of(gather_draft_triton)
def gather_draft(
    rows: RowTensors, slots_R: torch.Tensor, columns: int, max_position: int, block_size: int
) -> DraftQueries:
    """Returns the tokens, positions, cache slots and noise that `columns` columns of drafting need."""
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
