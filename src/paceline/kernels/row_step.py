"""The two ends of a step over resident rows: what each row runs next, and what of its samples it keeps.

A row is a line of several tensors (tokens, length, limit, ...), addressed by slot. `gather_queries` takes the
last token of each row and its proposals; `append_samples` keeps the samples up to the first that its proposal
did not foresee, cut at stop tokens and limits. A proposal of -1 means none: it runs as token 0 and agrees
with no sample. Each function is one launch, so that the step around the forward pass costs microseconds.
"""

from typing import NamedTuple

import torch

from paceline.kernels.operation import next_power_of_2, reference_of
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous


class RowTensors(NamedTuple):
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

    @property
    def is_cuda(self) -> bool:
        return self.tokens.is_cuda


class Queries(NamedTuple):
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


class TreeKeys(NamedTuple):
    """Where the keys of tree nodes lie, for R rows of Q nodes whose root is at position `context`.

    The key of node q's ancestor at position context + d lies in cache slot `slots_RQD[r, q, d]`; from the
    node's own depth on it is its own. Keys before the context are the row's, found through its block table.
    """

    depth_RQ: torch.Tensor
    slots_RQD: torch.Tensor


@triton.jit
def _gather_kernel(
    rows, given, out, keys, sizes, BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, PDL: tl.constexpr
):
    """One program per row; with parents the queries are the nodes of a tree (tree_gather.py)."""
    launch_next(PDL)
    wait_previous(PDL)
    slots_ptr, proposals_ptr, parents_ptr = given
    width, table_width, num_proposals, queries, max_position = sizes
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    length, limit = tl.load(rows.length + slot), tl.load(rows.limit + slot)
    active = tl.load(rows.active + slot) != 0
    q = tl.arange(0, BLOCK_Q)
    valid = q < queries
    place = length - 1 + q
    last = tl.load(rows.tokens + slot * width + length - 1)
    proposed = tl.load(proposals_ptr + slot * num_proposals + q - 1, mask=valid & (q > 0), other=0)
    block_ptr = rows.block_table + slot * table_width + place // BLOCK_SIZE
    block = tl.load(block_ptr, mask=valid, other=0).to(tl.int64)
    stored = (place < limit) & (active != 0)
    cache_slot = tl.where(stored, block * BLOCK_SIZE + place % BLOCK_SIZE, -1)
    at = row * queries + q
    position = place
    if parents_ptr is not None:
        # Row n of `lines` is node n's line of the table; a child's is its parent's with its own slot behind.
        depth = q * 0
        own = tl.maximum(cache_slot, 0)
        root = tl.sum(tl.where(q == 0, own, 0), axis=0)
        lines = tl.zeros((BLOCK_Q, BLOCK_Q), tl.int64) + root
        for node in range(1, queries):
            parent = tl.load(parents_ptr + slot * num_proposals + node - 1)
            node_depth = tl.sum(tl.where(q == parent, depth, 0), axis=0) + 1
            line = tl.sum(tl.where((q == parent)[:, None], lines, 0), axis=0)
            line = tl.where(q >= node_depth, tl.sum(tl.where(q == node, own, 0), axis=0), line)
            depth = tl.where(q == node, node_depth, depth)
            lines = tl.where((q == node)[:, None], line[None, :], lines)
        position = length - 1 + depth
        tl.store(keys.depth_RQ + at, depth.to(tl.int64), mask=valid)
        line_ptr = keys.slots_RQD + at[:, None] * queries + q[None, :]
        tl.store(line_ptr, lines, mask=valid[:, None] & valid[None, :])
    tl.store(out.tokens_RQ + at, tl.where(q == 0, last, tl.maximum(proposed, 0)), mask=valid)
    tl.store(out.positions_RQ + at, tl.minimum(position, max_position), mask=valid)
    tl.store(out.cache_slots_RQ + at, cache_slot, mask=valid)
    tl.store(out.sample_positions_RQ + at, position + 1, mask=valid)
    tl.store(out.seed_RQ + at, tl.load(rows.seed + slot) + q * 0, mask=valid)
    tl.store(out.temperature_RQ + at, tl.load(rows.temperature + slot) + q * 0.0, mask=valid)
    tl.store(out.context_R + row, tl.where(active, length - 1, -1))


def launch_gather(rows, slots_R, proposals_SK, parents_SK, queries, max_position, block_size):
    """Returns the queries of chains or, with parents, of trees, and of the latter the keys."""
    num_rows, device = slots_R.shape[0], slots_R.device
    tokens, positions, cache_slots, sample_positions, seed, *depth = torch.empty(
        5 if parents_SK is None else 6, num_rows, queries, dtype=torch.int64, device=device
    )
    context_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    temperature = torch.empty(num_rows, queries, dtype=rows.temperature.dtype, device=device)
    out = Queries(tokens, positions, cache_slots, context_R, sample_positions, seed, temperature)
    keys = None
    if depth:
        slots = torch.empty(num_rows, queries, queries, dtype=torch.int64, device=device)
        keys = TreeKeys(*depth, slots)
    sizes = rows.tokens.shape[1], rows.block_table.shape[1], proposals_SK.shape[1], queries, max_position
    _gather_kernel[(num_rows,)](
        rows,
        (slots_R, proposals_SK, parents_SK),
        out,
        keys,
        sizes,
        BLOCK_SIZE=block_size,
        BLOCK_Q=next_power_of_2(queries),
        **launch_options(num_warps=1),
    )
    return out, keys


def gather_queries_triton(rows, slots_R, proposals_SK, queries, max_position, block_size):
    return launch_gather(rows, slots_R, proposals_SK, None, queries, max_position, block_size)[0]


@triton.jit
def _append_kernel(rows, given, sizes, STOPS: tl.constexpr, BLOCK_Q: tl.constexpr, PDL: tl.constexpr):
    """One program per row."""
    launch_next(PDL)
    wait_previous(PDL)
    slots_ptr, proposals_ptr, sampled_ptr, sampled_logprobs_ptr, status_ptr = given
    width, num_proposals, queries, num_rows = sizes
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    length, limit = tl.load(rows.length + slot), tl.load(rows.limit + slot)
    active = tl.load(rows.active + slot) != 0
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
    stop_ids = tl.load(rows.stop_ids + slot * STOPS + tl.arange(0, STOPS))
    is_stop = tl.max((sampled[:, None] == stop_ids[None, :]).to(tl.int32), axis=1) > 0
    first_stop = tl.min(tl.where(is_stop & (q < count), q, BLOCK_Q), axis=0)
    stops = (first_stop < BLOCK_Q) & active
    count = tl.where(stops, (first_stop + 1).to(tl.int64), count)
    count = tl.where(active, count, 0)
    kept = valid & (q < count)
    tl.store(rows.tokens + slot * width + length + q, sampled, mask=kept)
    tl.store(rows.logprobs + slot * width + length + q, logprobs, mask=kept)
    new_length = length + count
    stopped = (tl.load(rows.stopped + slot) != 0) | stops
    still_active = active & (stops == 0) & (new_length < limit)
    tl.store(rows.length + slot, new_length)
    tl.store(rows.stopped + slot, stopped)
    tl.store(rows.active + slot, still_active)
    tl.store(status_ptr + row, new_length)
    tl.store(status_ptr + num_rows + row, tl.where(still_active, 0, tl.where(stopped, 2, 1)).to(tl.int64))
    tl.store(status_ptr + 2 * num_rows + row, tl.sum((has_proposal & (proposed >= 0)).to(tl.int64), axis=0))


def append_samples_triton(rows, slots_R, proposals_SK, sampled_RQ, logprobs_RQ):
    num_rows, queries = sampled_RQ.shape
    status_3R = torch.empty(3, num_rows, dtype=torch.int64, device=slots_R.device)
    _append_kernel[(num_rows,)](
        rows,
        (slots_R, proposals_SK, sampled_RQ, logprobs_RQ, status_3R),
        (rows.tokens.shape[1], proposals_SK.shape[1], queries, num_rows),
        STOPS=rows.stop_ids.shape[1],
        BLOCK_Q=next_power_of_2(queries),
        **launch_options(num_warps=1),
    )
    return status_3R


@reference_of(gather_queries_triton)
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


@reference_of(append_samples_triton)
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
