"""From R rows of up to Q tokens to the T tokens that a step runs, row after row, and back.

    rows       0  a b c .        tokens     0  a  b  c  1  d  2  e  f         `ragged.first_R`  0 4 6
               1  d . . .        index_RQ   0  1  2  3                        a token's place among the T;
               2  e f . .                   4  5  4  4                        the row's first for what is
                                            6  7  8  6                        not run

Products see T rows whatever their owners; attention needs to know which belong together (`RaggedRows`). To
whatever looks at single tokens, the T are rows of one query each. One launch.
"""

from dataclasses import dataclass, replace

import torch

from paceline.kernels.row_step import Queries
from paceline.kernels.tree_gather import TreeKeys
from paceline.kernels.triton_support import (
    launch_next,
    launch_options,
    next_power_of_2,
    tl,
    triton,
    wait_previous,
)

# Rows whose tokens are added up at a time.
SUMMED_ROWS = 256


@dataclass(frozen=True)
class RaggedRows:
    """Whose the T tokens of a step are: a row's lie together, in the rows' order."""

    # The index of each row's first token, and how many it has.
    first_R: torch.Tensor
    tokens_R: torch.Tensor
    row_T: torch.Tensor
    # Tokens of one row at most.
    most: int


@dataclass(frozen=True)
class PackedQueries:
    """The tokens that a step runs, as T rows of one query, and where they came from."""

    # All but `context_R`, which is the rows'.
    queries: Queries
    tree: TreeKeys | None
    ragged: RaggedRows
    # The slot that each token's row has.
    slots_T: torch.Tensor
    # The token's number among R x Q, and where each of those is among the T.
    source_T: torch.Tensor
    index_RQ: torch.Tensor
    # As the rows' `cache_slots_RQ`, -1 also for what is not run.
    cache_slots_RQ: torch.Tensor


def pack_queries_reference(
    slots_R: torch.Tensor, queries: Queries, tree: TreeKeys | None, tokens_R: torch.Tensor, total: int
) -> PackedQueries:
    """The reference of `pack_queries`."""
    num_rows, most = queries.tokens_RQ.shape
    device = slots_R.device
    first_R = tokens_R.cumsum(0) - tokens_R
    row_T = torch.repeat_interleave(torch.arange(num_rows, device=device), tokens_R, output_size=total)
    source_T = row_T * most + torch.arange(total, device=device) - first_R[row_T]
    query_Q = torch.arange(most, device=device)
    runs_RQ = query_Q < tokens_R.unsqueeze(1)

    def packed(x_RQ: torch.Tensor) -> torch.Tensor:
        return x_RQ.flatten(0, 1)[source_T].unsqueeze(1)

    flat = replace(
        queries,
        tokens_RQ=packed(queries.tokens_RQ),
        positions_RQ=packed(queries.positions_RQ),
        cache_slots_RQ=packed(queries.cache_slots_RQ),
        sample_positions_RQ=packed(queries.sample_positions_RQ),
        seed_RQ=packed(queries.seed_RQ),
        temperature_RQ=packed(queries.temperature_RQ),
    )
    return PackedQueries(
        flat,
        None if tree is None else TreeKeys(packed(tree.depth_RQ), packed(tree.slots_RQD)),
        RaggedRows(first_R, tokens_R, row_T, most),
        slots_R[row_T],
        source_T,
        first_R.unsqueeze(1) + torch.where(runs_RQ, query_Q, 0),
        torch.where(runs_RQ, queries.cache_slots_RQ, -1),
    )


@triton.jit(do_not_specialize=["most"])
def _pack_kernel(
    slots_ptr,
    row_tokens_ptr,
    tokens_ptr,
    positions_ptr,
    cache_ptr,
    sample_ptr,
    seed_ptr,
    temperature_ptr,
    depth_ptr,
    keys_ptr,
    out_tokens_ptr,
    out_positions_ptr,
    out_cache_ptr,
    out_sample_ptr,
    out_seed_ptr,
    out_temperature_ptr,
    out_depth_ptr,
    out_keys_ptr,
    out_first_ptr,
    out_row_ptr,
    out_slots_ptr,
    out_source_ptr,
    out_index_ptr,
    out_verified_ptr,
    most,
    reach,
    TREE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    SUMMED_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row."""
    launch_next(PDL)
    wait_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = row * 0
    for start in range(0, tl.program_id(0), SUMMED_ROWS):
        other = start + tl.arange(0, SUMMED_ROWS)
        first += tl.sum(tl.load(row_tokens_ptr + other, mask=other < row, other=0), axis=0)
    own = tl.load(row_tokens_ptr + row)
    q = tl.arange(0, BLOCK_Q)
    exists, runs = q < most, q < own
    source, out = row * most + q, first + q
    cache_slot = tl.load(cache_ptr + source, mask=exists, other=-1)
    tl.store(out_tokens_ptr + out, tl.load(tokens_ptr + source, mask=runs, other=0), mask=runs)
    tl.store(out_positions_ptr + out, tl.load(positions_ptr + source, mask=runs, other=0), mask=runs)
    tl.store(out_cache_ptr + out, cache_slot, mask=runs)
    tl.store(out_sample_ptr + out, tl.load(sample_ptr + source, mask=runs, other=0), mask=runs)
    tl.store(out_seed_ptr + out, tl.load(seed_ptr + source, mask=runs, other=0), mask=runs)
    tl.store(out_temperature_ptr + out, tl.load(temperature_ptr + source, mask=runs, other=0.0), mask=runs)
    tl.store(out_row_ptr + out, row + q * 0, mask=runs)
    tl.store(out_slots_ptr + out, tl.load(slots_ptr + row) + q * 0, mask=runs)
    tl.store(out_source_ptr + out, source, mask=runs)
    tl.store(out_first_ptr + row, first)
    tl.store(out_index_ptr + source, first + tl.where(runs, q, 0), mask=exists)
    tl.store(out_verified_ptr + source, tl.where(runs, cache_slot, -1), mask=exists)
    if TREE:
        d = tl.arange(0, BLOCK_Q)
        copied = runs[:, None] & (d < reach)[None, :]
        keys = tl.load(keys_ptr + source[:, None] * reach + d[None, :], mask=copied, other=0)
        tl.store(out_depth_ptr + out, tl.load(depth_ptr + source, mask=runs, other=0), mask=runs)
        tl.store(out_keys_ptr + out[:, None] * reach + d[None, :], keys, mask=copied)


def pack_queries_triton(
    slots_R: torch.Tensor, queries: Queries, tree: TreeKeys | None, tokens_R: torch.Tensor, total: int
) -> PackedQueries:
    """Launches `pack_queries`'s kernel."""
    num_rows, most = queries.tokens_RQ.shape
    device = slots_R.device
    tokens, positions, cache_slots, sample_positions, seed = torch.empty(
        5, total, 1, dtype=torch.int64, device=device
    )
    row_T, slots_T, source_T = torch.empty(3, total, dtype=torch.int64, device=device)
    index_RQ, verified_RQ = torch.empty(2, num_rows, most, dtype=torch.int64, device=device)
    first_R = torch.empty_like(tokens_R)
    temperature = torch.empty(total, 1, dtype=queries.temperature_RQ.dtype, device=device)
    packed_tree = None
    if tree is not None:
        packed_tree = TreeKeys(
            torch.empty(total, 1, dtype=torch.int64, device=device),
            torch.empty(total, 1, tree.slots_RQD.shape[2], dtype=torch.int64, device=device),
        )
    _pack_kernel[(num_rows,)](
        slots_R,
        tokens_R,
        queries.tokens_RQ,
        queries.positions_RQ,
        queries.cache_slots_RQ,
        queries.sample_positions_RQ,
        queries.seed_RQ,
        queries.temperature_RQ,
        None if tree is None else tree.depth_RQ,
        None if tree is None else tree.slots_RQD,
        tokens,
        positions,
        cache_slots,
        sample_positions,
        seed,
        temperature,
        None if packed_tree is None else packed_tree.depth_RQ,
        None if packed_tree is None else packed_tree.slots_RQD,
        first_R,
        row_T,
        slots_T,
        source_T,
        index_RQ,
        verified_RQ,
        most,
        1 if tree is None else tree.slots_RQD.shape[2],
        TREE=tree is not None,
        BLOCK_Q=next_power_of_2(most),
        SUMMED_ROWS=SUMMED_ROWS,
        **launch_options(num_warps=1),
    )
    flat = Queries(tokens, positions, cache_slots, queries.context_R, sample_positions, seed, temperature)
    ragged = RaggedRows(first_R, tokens_R, row_T, most)
    return PackedQueries(flat, packed_tree, ragged, slots_T, source_T, index_RQ, verified_RQ)


def pack_queries(
    slots_R: torch.Tensor, queries: Queries, tree: TreeKeys | None, tokens_R: torch.Tensor, total: int
) -> PackedQueries:
    """Returns the first `tokens_R` queries of each row, `total` of them, or of its tree's nodes."""
    run = pack_queries_triton if slots_R.is_cuda else pack_queries_reference
    return run(slots_R, queries, tree, tokens_R, total)
