"""Attention of many new queries per sequence over the paged KV cache: prefill, whole or in chunks.

Chunks of several sequences are packed: `cu_seqlens [S + 1]` bounds them in q, `context_len [S]` says how many
tokens of each sequence were in the cache before, and the chunk's own K and V have been written too.

    q      | seq 0: 5 new | seq 1: 3 new | ...      query j of sequence s is at position context_len[s] + j
    tiles  | t0 | t1 |    | t2 |    |               sequence s starts at tile cu_seqlens[s] // QUERIES + s

A query gets the bits that decoding would have given it, however the prompt was cut into chunks: tiles and
groups are those of attention_tiles.py, and the tensor core rounds alike for tiles of any height. Where
that is not required, long chunks take the kernel of prefill_flat.py.
"""

import torch

from paceline.kernels.attention_reference import attend_reference
from paceline.kernels.attention_shapes import Heads
from paceline.kernels.attention_tiles import (
    LOG2E,
    TILE,
    AttentionShape,
    Keys,
    as_fp8_query,
    attend_tile,
    fold,
    fresh,
    fresh_group,
    normalised,
    tile_blocks,
    whole,
)
from paceline.kernels.fp8_format import E4M3
from paceline.kernels.operation import next_power_of_2, reference_of
from paceline.kernels.prefill_flat import flat_attention_triton, flat_tiles_pay, gathering_pays
from paceline.kernels.prefill_tiles import queries_of_tile
from paceline.kernels.query_tiles import prefill_tiles
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous

# (query, head of the group) pairs per program.
QUERY_ROWS = 128
WARPS = 8
# Tiles in flight.
STAGES = 3
# The same over an E4M3 cache, with products that are over when their instruction is: see attention_tiles.py.
FP8_QUERY_ROWS = 32
FP8_WARPS = 4


@triton.jit(do_not_specialize=["num_sequences", "table_width"])
def _prefill_attention_kernel(
    q_ptr, cache, packing, out_ptr, num_sequences, table_width, scale, SHAPE: tl.constexpr, PDL: tl.constexpr
):
    """Programs (kv head, tile of a sequence's queries)."""
    launch_next(PDL)
    wait_previous(PDL)
    k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr = cache
    table_ptr, cu_seqlens_ptr, context_ptr = packing
    GQA: tl.constexpr = SHAPE.heads // SHAPE.kv_heads
    QUERIES: tl.constexpr = SHAPE.rows // SHAPE.padded_gqa
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    sequence, first_token, length, first_query = queries_of_tile(tile, cu_seqlens_ptr, num_sequences, QUERIES)
    if first_query >= length:
        return
    context = tl.load(context_ptr + sequence).to(tl.int32)
    query = first_query + tl.arange(0, SHAPE.rows) // SHAPE.padded_gqa
    member = tl.arange(0, SHAPE.rows) % SHAPE.padded_gqa
    valid = (query < length) & (member < GQA)
    q_row = (first_token + query).to(tl.int64) * SHAPE.heads + kv_head * GQA + member
    q_offset = q_row[:, None] * SHAPE.head_dim + tl.arange(0, SHAPE.head_dim)[None, :]
    q = tl.load(q_ptr + q_offset, mask=valid[:, None], other=0.0)
    if SHAPE.fp8:
        q = as_fp8_query(q)
        scale *= tl.load(k_scale_ptr + kv_head)
    keys = Keys(k_cache_ptr, v_cache_ptr, kv_head, scale)
    end = context + tl.minimum(length, first_query + QUERIES)
    state = fresh(SHAPE.rows, SHAPE.head_dim)
    row_table_ptr = table_ptr + sequence.to(tl.int64) * table_width
    block = tile_blocks(row_table_ptr, 0, table_width, SHAPE)
    group = fresh_group(SHAPE)
    for start in range(0, end, SHAPE.tile):
        group = attend_tile(q, group, context + query, start, end, block, keys, SHAPE)
        following = start + SHAPE.tile
        block = tile_blocks(row_table_ptr, following, table_width, SHAPE)
        if (following % SHAPE.group == 0) | (following >= end):
            state = fold(state, whole(group, SHAPE))
    out = normalised(state)
    if SHAPE.fp8:
        out *= tl.load(v_scale_ptr + kv_head)
    tl.store(out_ptr + q_offset, out.to(out_ptr.dtype.element_ty), mask=valid[:, None])


def prefill_attention_triton(
    q_THD,
    k_cache,
    v_cache,
    block_table_SB,
    cu_seqlens,
    context_len_S,
    rows=0,
    warps=0,
    stages=STAGES,
    k_scale_H=None,
    v_scale_H=None,
):
    """Launches the row-invariant kernel; 0 rows or warps: as many as suit the cache's type."""
    num_tokens, num_heads, head_dim = q_THD.shape
    num_sequences = context_len_S.shape[0]
    block_size, num_kv_heads = k_cache.shape[1:3]
    padded_gqa = next_power_of_2(num_heads // num_kv_heads)
    out = torch.empty_like(q_THD)
    fp8 = k_cache.dtype == E4M3
    rows = max(rows or (FP8_QUERY_ROWS if fp8 else QUERY_ROWS), padded_gqa)
    options = launch_options(
        warps or (FP8_WARPS if fp8 else WARPS),
        stages,
        stage_bytes=2 * TILE * head_dim * k_cache.itemsize,
        held_bytes=rows * head_dim * q_THD.itemsize,
    )
    _prefill_attention_kernel[(num_kv_heads, num_tokens // (rows // padded_gqa) + num_sequences)](
        q_THD,
        (k_cache, v_cache.view(torch.int16) if fp8 else v_cache, k_scale_H, v_scale_H),
        (block_table_SB, cu_seqlens, context_len_S),
        out,
        num_sequences,
        block_table_SB.shape[1],
        head_dim**-0.5 * LOG2E,
        SHAPE=AttentionShape(num_heads, num_kv_heads, head_dim, block_size, rows, padded_gqa, fp8),
        **options,
    )
    return out


def _fastest_prefill(
    q_THD,
    k_cache,
    v_cache,
    block_table_SB,
    cu_seqlens,
    context_len_S,
    k_scale_H=None,
    v_scale_H=None,
    deterministic=True,
):
    inputs = q_THD, k_cache, v_cache, block_table_SB, cu_seqlens, context_len_S
    keys = block_table_SB.shape[1] * k_cache.shape[1]
    if not deterministic and flat_tiles_pay(q_THD, len(context_len_S), keys):
        gathered = gathering_pays(q_THD, k_cache, block_table_SB)
        if gathered or k_cache.dtype != E4M3:
            return flat_attention_triton(*inputs, k_scale_H, v_scale_H, gathered)
    return prefill_attention_triton(*inputs, k_scale_H=k_scale_H, v_scale_H=v_scale_H)


@reference_of(_fastest_prefill)
def prefill_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table_SB: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_len_S: torch.Tensor,
    k_scale_H: torch.Tensor | None = None,
    v_scale_H: torch.Tensor | None = None,
    deterministic: bool = True,
) -> torch.Tensor:
    """Returns the attention of packed `q [T, Hq, D]`, in the same shape.

    `block_table_SB` is int32, `cu_seqlens` int32 or int64 with S + 1 entries. Tokens past the last sequence
    are padding: their output is undefined. Not `deterministic`: the bits of long chunks may depend on how
    prompts are cut into them.
    """
    _, num_heads, head_dim = q_THD.shape
    heads = Heads.of(num_heads, k_cache.shape[2], head_dim, q_THD.dtype)
    tiles = prefill_tiles(heads, k_cache.shape[1], len(q_THD), block_table_SB, cu_seqlens, context_len_S)
    return attend_reference(q_THD, tiles, k_cache, v_cache, k_scale_H, v_scale_H)
