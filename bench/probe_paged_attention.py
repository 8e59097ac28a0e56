"""Attention of a few new queries per row over the paged KV cache: decoding (Q = 1) and verification (Q = k + 1).

Query j of row r sits at absolute position context_len[r] + j and attends to keys 0 .. context_len[r] + j; a row with
context_len < 0 is inactive and gives zeros. The caches are [num_blocks, block_size, num_kv_heads, head_dim].

A query's bits depend on its own sequence only, not on the batch, on Q, or on whether a prefill kernel computed it:

    keys    | split 0 | split 1 | split 2 |      SPLIT keys each; boundaries are absolute positions
    result = fold(fold(split 0, split 1), split 2)    each split from a fresh state, folded left to right by whoever does it

With few rows, many programs share a row's splits and a second kernel folds their partial results; with many rows one
program walks its whole row and folds in registers. Both fold the same numbers in the same order. Queries and the heads
of a GQA group are packed into the tile's rows; row sums go through the tensor core like everything else, because the
order of a plain reduction depends on the layout the compiler picks. Masked keys add exact zeros.
"""

import torch
import torch.nn.functional as F

from paceline.kernels.triton_support import (
    cdiv,
    launch_next,
    launch_options,
    multiprocessors,
    next_power_of_2,
    tl,
    triton,
    wait_previous,
)  # fmt: skip

SPLIT = 128  # keys per partial result
QUERY_ROWS = 16  # (query, head of the group) pairs per program: one tensor-core tile
LOG2E = 1.4426950408889634

REFERENCE_KEYS = 64  # keys per step of the reference
REFERENCE_TOKENS = 128  # queries per slice of the reference, to bound its memory


def attend_reference(
    q_THD: torch.Tensor, position_T: torch.Tensor, block_table_TB: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> torch.Tensor:
    """Each query by itself at its absolute position with its own block table; position < 0 gives zeros.

    Every product is a `bmm` whose matrices have the same shape whatever the batch, and keys are taken REFERENCE_KEYS at a time.
    """
    slices = zip(*(x.split(REFERENCE_TOKENS) for x in (q_THD, position_T, block_table_TB)), strict=True)
    return torch.cat([_attend_slice(q, position, table, k_cache, v_cache) for q, position, table in slices])


def _attend_slice(q_THD, position_T, block_table_TB, k_cache, v_cache):
    """A step takes whole blocks, REFERENCE_KEYS keys, of the rows that reach that far; shapes per row never change."""
    num_tokens, num_heads, head_dim = q_THD.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    wide = torch.float64 if q_THD.dtype == torch.float64 else torch.float32
    keys, values = k_cache.flatten(1), v_cache.flatten(1)
    blocks_per_step = cdiv(REFERENCE_KEYS, block_size)
    step_keys = blocks_per_step * block_size
    q = (q_THD.to(wide) * head_dim**-0.5).view(num_tokens, num_kv_heads, -1, head_dim).transpose(0, 1)
    acc = torch.zeros(q.shape, dtype=wide)
    maximum = torch.full((*q.shape[:3], 1), -torch.inf, dtype=wide)
    total = torch.zeros_like(maximum)
    for start in range(0, int(position_T.max()) + 1, step_keys):
        rows = (position_T >= start).nonzero().squeeze(1)
        first_block = start // block_size
        blocks = block_table_TB[rows, first_block : first_block + blocks_per_step]
        blocks = F.pad(blocks, (0, blocks_per_step - blocks.shape[1])).flatten()
        hidden_TN = torch.arange(start, start + step_keys) > position_T[rows].unsqueeze(1)
        k = keys.index_select(0, blocks).to(wide).view(len(rows), step_keys, num_kv_heads, head_dim)
        v = values.index_select(0, blocks).to(wide).view(len(rows), step_keys, num_kv_heads, head_dim)
        v.masked_fill_(hidden_TN[:, :, None, None], 0.0)  # a slot never written may hold anything, and 0 x NaN is NaN
        scores = torch.stack([torch.bmm(q[h, rows], k[:, :, h].transpose(1, 2)) for h in range(num_kv_heads)])
        scores.masked_fill_(hidden_TN.unsqueeze(1), -torch.inf)
        old_maximum = maximum[:, rows]
        new_maximum = torch.maximum(old_maximum, scores.amax(-1, keepdim=True))
        weights, rescale = (scores - new_maximum).exp_(), (old_maximum - new_maximum).exp_()
        total[:, rows] = total[:, rows] * rescale + weights.sum(-1, keepdim=True)
        weighted = torch.stack([torch.bmm(weights[h], v[:, :, h]) for h in range(num_kv_heads)])
        acc[:, rows] = acc[:, rows] * rescale + weighted
        maximum[:, rows] = new_maximum
    out = torch.where(total > 0, acc / total, 0.0)
    return out.transpose(0, 1).reshape(num_tokens, num_heads, head_dim).to(q_THD.dtype)


def paged_attention_reference(q_RQHD, k_cache, v_cache, block_table_RB, context_len_R):
    num_rows, num_queries, num_heads, head_dim = q_RQHD.shape
    position_RQ = context_len_R.unsqueeze(1) + torch.arange(num_queries)
    position_RQ = torch.where(context_len_R.unsqueeze(1) < 0, -1, position_RQ)
    table = block_table_RB.repeat_interleave(num_queries, dim=0)
    return attend_reference(q_RQHD.flatten(0, 1), position_RQ.flatten(), table, k_cache, v_cache).view(q_RQHD.shape)


@triton.jit
def attend_split(
    q, query_position, start, end, table_ptr, k_cache_ptr, v_cache_ptr, kv_head, scale,
    HEAD_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, HEAD_MAJOR: tl.constexpr = False,
):  # fmt: skip
    """Softmax of `q [rows, HEAD_DIM]` over the SPLIT keys from `start`: (unnormalised sum, maximum, total weight).

    Keys from `end` on do not exist. `scale` turns scores into base-2 exponents.
    """
    token = start + tl.arange(0, SPLIT)
    exists = token < end
    block = tl.load(table_ptr + token // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + token % BLOCK_SIZE
    if HEAD_MAJOR:
        row_index = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE
    else:
        row_index = slot * NUM_KV_HEADS + kv_head
    offset = row_index[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    k = tl.load(k_cache_ptr + offset, mask=exists[:, None], other=0.0)
    v = tl.load(v_cache_ptr + offset, mask=exists[:, None], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(token[None, :] <= query_position[:, None], scores, -float("inf"))
    maximum = tl.max(scores, axis=1)
    finite = tl.where(maximum == -float("inf"), 0.0, maximum)
    weights = tl.exp2(scores - finite[:, None]).to(v.dtype)
    acc = tl.dot(weights, v, input_precision="ieee")
    # Equal columns. More columns than rows: for a square result the compiler would stack the warps over 16 rows.
    COLUMNS: tl.constexpr = 16 if q.shape[0] >= 64 else 2 * q.shape[0]
    total = tl.dot(weights, tl.full((SPLIT, COLUMNS), 1.0, v.dtype), input_precision="ieee")
    return acc, maximum, tl.max(total, axis=1)


@triton.jit
def fold(acc, maximum, total, split_acc, split_maximum, split_total):
    """Add one split's result to what the splits before it gave. Adding an empty split changes no bit."""
    new_maximum = tl.maximum(maximum, split_maximum)
    finite = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    old, new = tl.exp2(maximum - finite), tl.exp2(split_maximum - finite)
    acc = acc * tl.expand_dims(old, -1) + split_acc * tl.expand_dims(new, -1)
    return acc, new_maximum, total * old + split_total * new


@triton.jit
def normalised(acc, total):
    total = tl.expand_dims(total, -1)
    return tl.where(total > 0, acc / tl.where(total > 0, total, 1.0), 0.0)


@triton.jit(do_not_specialize=["num_queries", "table_width", "max_splits"])
def _paged_attention_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, table_ptr, context_ptr, out_ptr, acc_ptr, maximum_ptr, total_ptr,
    num_queries, table_width, max_splits, scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, PADDED_GROUP: tl.constexpr, SPLIT: tl.constexpr, SHARED: tl.constexpr, HEAD_MAJOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (kv head, row and query tile, p): program p of P takes splits p, p + P, ... SHARED means P > 1."""
    launch_next(PDL)
    wait_previous(PDL)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    QUERIES: tl.constexpr = ROWS // PADDED_GROUP
    query_tiles = tl.cdiv(num_queries, QUERIES)
    row, query_tile = tl.program_id(1) // query_tiles, tl.program_id(1) % query_tiles
    kv_head = tl.program_id(0)  # fastest, because the heads of a token are neighbours in memory
    query = query_tile * QUERIES + tl.arange(0, ROWS) // PADDED_GROUP
    member = tl.arange(0, ROWS) % PADDED_GROUP
    valid = (query < num_queries) & (member < GROUP)
    head = kv_head * GROUP + member
    context = tl.load(context_ptr + row).to(tl.int32)
    last_query = tl.minimum(num_queries, query_tile * QUERIES + QUERIES)
    end = tl.where(context < 0, 0, context + last_query)
    num_splits = tl.cdiv(end, SPLIT)

    column = tl.arange(0, HEAD_DIM)
    q_row = (row * num_queries + query) * NUM_HEADS + head
    q_offset = q_row.to(tl.int64)[:, None] * HEAD_DIM + column[None, :]
    q = tl.load(q_ptr + q_offset, mask=valid[:, None], other=0.0)
    row_table_ptr = table_ptr + row.to(tl.int64) * table_width
    acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    maximum = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for split in range(tl.program_id(2), num_splits, tl.num_programs(2)):
        split_acc, split_maximum, split_total = attend_split(
            q, context + query, split * SPLIT, end, row_table_ptr, k_cache_ptr, v_cache_ptr, kv_head, scale,
            HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, SPLIT, HEAD_MAJOR,
        )  # fmt: skip
        if not SHARED:
            acc, maximum, total = fold(acc, maximum, total, split_acc, split_maximum, split_total)
        else:
            partial = q_row.to(tl.int64) * max_splits + split
            tl.store(acc_ptr + partial[:, None] * HEAD_DIM + column[None, :], split_acc, mask=valid[:, None])
            tl.store(maximum_ptr + partial, split_maximum, mask=valid)
            tl.store(total_ptr + partial, split_total, mask=valid)
    if not SHARED:
        tl.store(out_ptr + q_offset, normalised(acc, total).to(out_ptr.dtype.element_ty), mask=valid[:, None])


@triton.jit(do_not_specialize=["num_queries", "max_splits"])
def _combine_kernel(
    acc_ptr, maximum_ptr, total_ptr, context_ptr, out_ptr, num_queries, max_splits,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLIT: tl.constexpr, BATCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per (query, head). Splits are loaded BATCH at a time and folded one by one."""
    launch_next(PDL)
    wait_previous(PDL)
    query_row = tl.program_id(0)
    context = tl.load(context_ptr + query_row // num_queries).to(tl.int32)
    num_splits = tl.where(context < 0, 0, (context + query_row % num_queries) // SPLIT + 1)
    q_row = query_row.to(tl.int64) * NUM_HEADS + tl.program_id(1)
    column = tl.arange(0, HEAD_DIM)
    index = tl.arange(0, BATCH)
    acc = tl.zeros((1, HEAD_DIM), tl.float32)
    maximum = tl.full((1,), -float("inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    for first in range(0, num_splits, BATCH):
        partial = q_row * max_splits + first + index
        exists = first + index < num_splits
        maxima = tl.load(maximum_ptr + partial, mask=exists, other=-float("inf"))
        totals = tl.load(total_ptr + partial, mask=exists, other=0.0)
        accs = tl.load(acc_ptr + partial[:, None] * HEAD_DIM + column[None, :], mask=exists[:, None], other=0.0)
        for i in tl.static_range(BATCH):
            pick = index == i  # one term and zeros: the sums and the maximum only select
            split_acc = tl.sum(tl.where(pick[:, None], accs, 0.0), axis=0)[None, :]
            split_maximum = tl.max(tl.where(pick, maxima, -float("inf")), axis=0)
            split_total = tl.sum(tl.where(pick, totals, 0.0), axis=0)
            acc, maximum, total = fold(acc, maximum, total, split_acc, split_maximum, split_total)
    out = normalised(acc, total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + q_row * HEAD_DIM + column[None, :], out)


def paged_attention_triton(q_RQHD, k_cache, v_cache, block_table_RB, context_len_R, fill=1, stages=None, SPLIT=SPLIT, warps=4, head_major=False):
    num_rows, num_queries, num_heads, head_dim = q_RQHD.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    padded_group = next_power_of_2(num_heads // num_kv_heads)
    rows = max(QUERY_ROWS, padded_group)
    row_tiles = num_rows * cdiv(num_queries, rows // padded_group)
    max_splits = cdiv(block_table_RB.shape[1] * block_size, SPLIT)
    # Share rows until every multiprocessor has a program; pipeline loads once occupancy no longer hides their latency.
    # Neither choice changes a bit.
    processors = multiprocessors(q_RQHD.device)
    programs = min(max_splits, cdiv(fill * processors, row_tiles * num_kv_heads))
    stages = stages or (2 if row_tiles * num_kv_heads > 4 * processors else 1)
    out = torch.empty_like(q_RQHD)
    acc = maximum = total = None
    if programs > 1:
        partials = (num_rows, num_queries, num_heads, max_splits)
        acc = torch.empty(*partials, head_dim, dtype=torch.float32, device=q_RQHD.device)
        maximum, total = torch.empty(2, *partials, dtype=torch.float32, device=q_RQHD.device)
    _paged_attention_kernel[(num_kv_heads, row_tiles, programs)](
        q_RQHD, k_cache, v_cache, block_table_RB, context_len_R, out, acc, maximum, total,
        num_queries, block_table_RB.shape[1], max_splits, head_dim**-0.5 * LOG2E,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, ROWS=rows,
        PADDED_GROUP=padded_group, SPLIT=SPLIT, SHARED=programs > 1, HEAD_MAJOR=head_major,
        **launch_options(num_warps=warps, num_stages=stages),
    )  # fmt: skip
    if programs > 1:
        _combine_kernel[(num_rows * num_queries, num_heads)](
            acc, maximum, total, context_len_R, out, num_queries, max_splits,
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, SPLIT=SPLIT, BATCH=4, **launch_options(num_warps=1),
        )  # fmt: skip
    return out


def paged_attention(
    q_RQHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table_RB: torch.Tensor,
    context_len_R: torch.Tensor,
) -> torch.Tensor:
    """Attention of `q [R, Q, Hq, D]` with scale 1 / sqrt(D); the new tokens' K and V are already in the cache.

    `block_table_RB` int32; `context_len_R` is the absolute position of each row's first query, negative = inactive.
    """
    run = paged_attention_triton if q_RQHD.is_cuda else paged_attention_reference
    return run(q_RQHD, k_cache, v_cache, block_table_RB, context_len_R)
