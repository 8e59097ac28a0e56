"""The two ends of a step over resident rows: what each row runs next, and what of its samples it keeps.

A row is a line of several tensors (tokens, length, limit, ...), addressed by slot. `gather_queries` takes the
last token of each row and its proposals; `append_samples` keeps the samples up to the first that its proposal
did not foresee, cut at stop tokens and limits. A proposal of -1 means none: it runs as token 0 and agrees
with no sample. Each function is one launch, so that the step around the forward pass costs microseconds.
"""

from dataclasses import dataclass

import torch

from paceline.kernels.triton_support import (
    launch_next,
    launch_options,
    next_power_of_2,
    tl,
    triton,
    wait_previous,
)


@dataclass(frozen=True)
class RowTensors:
    """The state of all rows; the first dimension of every tensor is the slot."""

    # By position: prompt and response, and the logprob of each sampled token.
    tokens: torch.Tensor
    logprobs: torch.Tensor
    # Tokens so far, and at which length the row must end.
    length: torch.Tensor
    limit: torch.Tensor
    # Whether the row is running, and whether a stop token has ended it.
    active: torch.Tensor
    stopped: torch.Tensor
    # The request's sampling parameters.
    seed: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    # Padded with -1.
    stop_ids: torch.Tensor
    block_table: torch.Tensor


@dataclass(frozen=True)
class Queries:
    """What the forward pass and the sampler need, for R rows of Q tokens."""

    tokens_RQ: torch.Tensor
    # Clamped to the last position there is.
    positions_RQ: torch.Tensor
    # -1: do not store.
    cache_slots_RQ: torch.Tensor
    # The position of the first query; -1: the row is not active.
    context_R: torch.Tensor
    sample_positions_RQ: torch.Tensor
    seed_RQ: torch.Tensor
    temperature_RQ: torch.Tensor


def gather_queries_reference(
    rows: RowTensors,
    slots_R: torch.Tensor,
    proposals_SK: torch.Tensor,
    queries: int,
    max_position: int,
    block_size: int,
) -> Queries:
    length_R, active_R, limit_R = rows.length[slots_R], rows.active[slots_R], rows.limit[slots_R]
    last_R1 = rows.tokens[slots_R, length_R - 1].unsqueeze(1)
    positions_RQ = (length_R - 1).unsqueeze(1) + torch.arange(queries, device=slots_R.device)
    # Positions past the limit are computed, because the shape is fixed, but not stored.
    stored_RQ = active_R.unsqueeze(1) & (positions_RQ < limit_R.unsqueeze(1))
    block_RQ = rows.block_table[slots_R.unsqueeze(1), positions_RQ // block_size].long()
    return Queries(
        tokens_RQ=torch.cat((last_R1, proposals_SK[slots_R, : queries - 1].clamp(min=0)), dim=1),
        positions_RQ=positions_RQ.clamp(max=max_position),
        cache_slots_RQ=torch.where(stored_RQ, block_RQ * block_size + positions_RQ % block_size, -1),
        context_R=torch.where(active_R, length_R - 1, -1),
        sample_positions_RQ=positions_RQ + 1,
        seed_RQ=rows.seed[slots_R].unsqueeze(1).expand(-1, queries).contiguous(),
        temperature_RQ=rows.temperature[slots_R].unsqueeze(1).expand(-1, queries).contiguous(),
    )


def append_samples_reference(
    rows: RowTensors,
    slots_R: torch.Tensor,
    proposals_SK: torch.Tensor,
    sampled_RQ: torch.Tensor,
    logprobs_RQ: torch.Tensor,
) -> torch.Tensor:
    queries = sampled_RQ.shape[1]
    length_R, active_R, limit_R = rows.length[slots_R], rows.active[slots_R], rows.limit[slots_R]
    offsets_Q = torch.arange(queries, device=slots_R.device)
    proposed_RK = proposals_SK[slots_R, : queries - 1]
    agreed_RK = (sampled_RQ[:, :-1] == proposed_RK).long().cumprod(1)
    count_R = torch.minimum(agreed_RK.sum(1) + 1, limit_R - length_R)
    is_stop_RQ = (sampled_RQ.unsqueeze(-1) == rows.stop_ids[slots_R].unsqueeze(1)).any(-1) & (
        offsets_Q < count_R.unsqueeze(1)
    )
    stops_R = is_stop_RQ.any(1) & active_R
    count_R = torch.where(stops_R, is_stop_RQ.long().argmax(1) + 1, count_R) * active_R

    appended_RQ = offsets_Q < count_R.unsqueeze(1)
    slot_R1 = slots_R.unsqueeze(1)
    where_RQ = length_R.unsqueeze(1) + offsets_Q
    rows.tokens[slot_R1, where_RQ] = torch.where(appended_RQ, sampled_RQ, rows.tokens[slot_R1, where_RQ])
    rows.logprobs[slot_R1, where_RQ] = torch.where(appended_RQ, logprobs_RQ, rows.logprobs[slot_R1, where_RQ])
    length_R = length_R + count_R
    stopped_R = rows.stopped[slots_R] | stops_R
    active_R = active_R & ~stops_R & (length_R < limit_R)
    rows.length[slots_R] = length_R
    rows.stopped[slots_R] = stopped_R
    rows.active[slots_R] = active_R
    return torch.stack(
        (length_R, torch.where(active_R, 0, torch.where(stopped_R, 2, 1)), (proposed_RK >= 0).sum(1))
    )


@triton.jit
def _gather_kernel(
    slots_ptr,
    tokens_ptr,
    length_ptr,
    limit_ptr,
    active_ptr,
    seed_ptr,
    temperature_ptr,
    table_ptr,
    proposals_ptr,
    out_tokens_ptr,
    out_positions_ptr,
    out_cache_ptr,
    out_context_ptr,
    out_sample_ptr,
    out_seed_ptr,
    out_temperature_ptr,
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
    position = length - 1 + q
    last = tl.load(tokens_ptr + slot * width + length - 1)
    proposed = tl.load(proposals_ptr + slot * num_proposals + q - 1, mask=valid & (q > 0), other=0)
    block = tl.load(table_ptr + slot * table_width + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
    stored = (position < limit) & (active != 0)
    out = row * queries + q
    tl.store(out_tokens_ptr + out, tl.where(q == 0, last, tl.maximum(proposed, 0)), mask=valid)
    tl.store(out_positions_ptr + out, tl.minimum(position, max_position), mask=valid)
    tl.store(
        out_cache_ptr + out, tl.where(stored, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=valid
    )
    tl.store(out_sample_ptr + out, position + 1, mask=valid)
    tl.store(out_seed_ptr + out, tl.load(seed_ptr + slot) + q * 0, mask=valid)
    tl.store(out_temperature_ptr + out, tl.load(temperature_ptr + slot) + q * 0.0, mask=valid)
    tl.store(out_context_ptr + row, tl.where(active, length - 1, -1))


@triton.jit
def _append_kernel(
    slots_ptr,
    tokens_ptr,
    logprobs_ptr,
    length_ptr,
    limit_ptr,
    active_ptr,
    stopped_ptr,
    stop_ids_ptr,
    proposals_ptr,
    sampled_ptr,
    sampled_logprobs_ptr,
    status_ptr,
    width,
    num_proposals,
    queries,
    num_rows,
    STOPS: tl.constexpr,
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
    sampled = tl.load(sampled_ptr + row * queries + q, mask=valid, other=0)
    logprobs = tl.load(sampled_logprobs_ptr + row * queries + q, mask=valid, other=0.0)
    has_proposal = q < queries - 1
    proposed = tl.load(proposals_ptr + slot * num_proposals + q, mask=has_proposal, other=0)
    # The first sample that its proposal did not foresee is still kept: it is the policy's own.
    last_kept = tl.min(
        tl.where(has_proposal & (sampled == proposed), BLOCK_Q, tl.where(valid, q, BLOCK_Q)), axis=0
    )
    count = tl.minimum((last_kept + 1).to(tl.int64), limit - length)
    stop_ids = tl.load(stop_ids_ptr + slot * STOPS + tl.arange(0, STOPS))
    is_stop = tl.max((sampled[:, None] == stop_ids[None, :]).to(tl.int32), axis=1) > 0
    first_stop = tl.min(tl.where(is_stop & (q < count), q, BLOCK_Q), axis=0)
    stops = (first_stop < BLOCK_Q) & active
    count = tl.where(stops, (first_stop + 1).to(tl.int64), count)
    count = tl.where(active, count, 0)
    kept = valid & (q < count)
    tl.store(tokens_ptr + slot * width + length + q, sampled, mask=kept)
    tl.store(logprobs_ptr + slot * width + length + q, logprobs, mask=kept)
    new_length = length + count
    stopped = (tl.load(stopped_ptr + slot) != 0) | stops
    still_active = active & (stops == 0) & (new_length < limit)
    tl.store(length_ptr + slot, new_length)
    tl.store(stopped_ptr + slot, stopped)
    tl.store(active_ptr + slot, still_active)
    tl.store(status_ptr + row, new_length)
    tl.store(status_ptr + num_rows + row, tl.where(still_active, 0, tl.where(stopped, 2, 1)).to(tl.int64))
    tl.store(status_ptr + 2 * num_rows + row, tl.sum((has_proposal & (proposed >= 0)).to(tl.int64), axis=0))


def gather_queries_triton(
    rows: RowTensors,
    slots_R: torch.Tensor,
    proposals_SK: torch.Tensor,
    queries: int,
    max_position: int,
    block_size: int,
) -> Queries:
    num_rows, device = slots_R.shape[0], slots_R.device
    tokens, positions, cache_slots, sample_positions, seed = torch.empty(
        5, num_rows, queries, dtype=torch.int64, device=device
    )
    context_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    temperature = torch.empty(num_rows, queries, dtype=rows.temperature.dtype, device=device)
    _gather_kernel[(num_rows,)](
        slots_R,
        rows.tokens,
        rows.length,
        rows.limit,
        rows.active,
        rows.seed,
        rows.temperature,
        rows.block_table,
        proposals_SK,
        tokens,
        positions,
        cache_slots,
        context_R,
        sample_positions,
        seed,
        temperature,
        rows.tokens.shape[1],
        rows.block_table.shape[1],
        proposals_SK.shape[1],
        queries,
        max_position,
        BLOCK_SIZE=block_size,
        BLOCK_Q=next_power_of_2(queries),
        **launch_options(num_warps=1),
    )
    return Queries(tokens, positions, cache_slots, context_R, sample_positions, seed, temperature)


def append_samples_triton(
    rows: RowTensors,
    slots_R: torch.Tensor,
    proposals_SK: torch.Tensor,
    sampled_RQ: torch.Tensor,
    logprobs_RQ: torch.Tensor,
) -> torch.Tensor:
    num_rows, queries = sampled_RQ.shape
    status_3R = torch.empty(3, num_rows, dtype=torch.int64, device=slots_R.device)
    _append_kernel[(num_rows,)](
        slots_R,
        rows.tokens,
        rows.logprobs,
        rows.length,
        rows.limit,
        rows.active,
        rows.stopped,
        rows.stop_ids,
        proposals_SK,
        sampled_RQ,
        logprobs_RQ,
        status_3R,
        rows.tokens.shape[1],
        proposals_SK.shape[1],
        queries,
        num_rows,
        STOPS=rows.stop_ids.shape[1],
        BLOCK_Q=next_power_of_2(queries),
        **launch_options(num_warps=1),
    )
    return status_3R


def gather_queries(
    rows: RowTensors,
    slots_R: torch.Tensor,
    proposals_SK: torch.Tensor,
    queries: int,
    max_position: int,
    block_size: int,
) -> Queries:
    """Returns each row's last token and its first `queries - 1` proposals, with what they run with.

    That is positions, cache slots, and the seed and temperature of their samples.
    """
    run = gather_queries_triton if slots_R.is_cuda else gather_queries_reference
    return run(rows, slots_R, proposals_SK, queries, max_position, block_size)


def append_samples(
    rows: RowTensors,
    slots_R: torch.Tensor,
    proposals_SK: torch.Tensor,
    sampled_RQ: torch.Tensor,
    logprobs_RQ: torch.Tensor,
) -> torch.Tensor:
    """Writes the samples that are kept into the rows.

    Returns `[3, R]`: lengths; 0 running, 1 ended at its limit, 2 stopped; how many tokens were proposed.
    """
    run = append_samples_triton if slots_R.is_cuda else append_samples_reference
    return run(rows, slots_R, proposals_SK, sampled_RQ, logprobs_RQ)
