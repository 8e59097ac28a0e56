"""Prefill attention with one softmax over all keys: faster than prefill_attention.py, with bits of its own.

Without groups there is one accumulator instead of two, so tiles can be larger, and keys that every query sees
need no mask. Chunks are packed, and dealt to programs, as in prefill_attention.py. Keys and values are read
in one of two ways:

    pointers    through the block table, token by token
    gathered    first brought together, [Hkv, S * span, D]; then whole tiles are loaded by TMA

    span        | seq 0: keys | zeros | - | seq 1: keys | zeros | - | ...
                            tile ends ┘

A span has room for the table's width in whole tiles, so no tile reaches into the next sequence. What lies
between a sequence's last key and the end of that tile are zeros: a masked weight is zero, and zero times
whatever the memory held before could be NaN. No tile reads what comes after.

E4M3 caches are only read gathered, converted to the queries' type, which holds every E4M3 number exactly if
it has 16 bits. Their scales are applied as elsewhere: K's to the softmax scale, V's to the result.
"""

import torch

from paceline.kernels.attention_tiles import LOG2E, fresh, normalised, tile_blocks
from paceline.kernels.fp8_format import E4M3
from paceline.kernels.operation import cdiv, next_power_of_2
from paceline.kernels.prefill_tiles import queries_of_tile
from paceline.kernels.triton_support import (
    TensorDescriptor,
    fitting_stages,
    has_tma,
    launch_next,
    launch_options,
    shared_memory,
    tl,
    triton,
    wait_previous,
)

# (query, head of the group) pairs per program.
QUERY_ROWS = 128
WARPS = 8
# Tiles in flight.
STAGES = 3
# Keys of a tile, as many as registers hold.
FLAT_TILE = 128
# Tokens of a sequence, on average, from which on flat tiles may pay: a prompt's last one is half empty.
FLAT_TOKENS = 512
# (query, key) pairs of a head that a chunk may have, from which on they do, and from which on gathering does.
# Below, launches take the time. H200, 32 query and 8 KV heads of 128, ms of the deterministic kernel,
# pointers, gathered: 512 tokens 0.08, 0.14, 0.26; 8 times 1,024 0.33, 0.31, 0.32; 512 behind 30,000 0.86,
# 0.62, 0.54.
FLAT_PAIRS = 4 << 20
GATHER_PAIRS = 12 << 20
# The most bytes that gathered keys and values may take; what is more is read through the table.
GATHERED_BYTES = 512 << 20
# Tokens that one program gathers.
GATHER_TOKENS = 64
GATHER_WARPS = 4


def flat_tiles_pay(q_THD: torch.Tensor, sequences: int, keys: int) -> bool:
    """Returns whether a chunk is long, with up to `keys` of each sequence, and flat tiles fit.

    That is, shared memory holds as many stages as of others.
    """
    row_bytes = q_THD.shape[-1] * q_THD.itemsize
    limit = shared_memory(q_THD.device)
    stages = fitting_stages(STAGES, 2 * FLAT_TILE * row_bytes, QUERY_ROWS * row_bytes, limit)
    long = len(q_THD) >= FLAT_TOKENS * sequences and len(q_THD) * keys >= FLAT_PAIRS
    return stages == STAGES and long


def gathering_pays(q_THD: torch.Tensor, k_cache: torch.Tensor, block_table_SB: torch.Tensor) -> bool:
    """Returns whether chunks with flat tiles should gather their keys.

    Chunks over an E4M3 cache do whenever they can: without, flat tiles are not for them.
    """
    sequences, table_width = block_table_SB.shape
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    keys = table_width * block_size
    taken = gathered_bytes(sequences, keys, num_kv_heads, head_dim, q_THD.itemsize)
    return (
        q_THD.itemsize == 2
        and has_tma(q_THD.device)
        and taken <= GATHERED_BYTES
        and (len(q_THD) * keys >= GATHER_PAIRS or k_cache.dtype == E4M3)
    )


def gathered_bytes(sequences: int, tokens: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Returns what gathered keys and values take, where the block table has room for `tokens`."""
    return 2 * num_kv_heads * sequences * _span(tokens, FLAT_TILE) * head_dim * itemsize


def most_gathered_bytes(
    chunk_tokens: int, longest: int, num_kv_heads: int, head_dim: int, itemsize: int
) -> int:
    """Returns the most that a chunk of sequences of up to `longest` tokens gathers at once."""
    if itemsize != 2:
        return 0
    sequences = chunk_tokens // FLAT_TOKENS
    return min(GATHERED_BYTES, gathered_bytes(sequences, longest, num_kv_heads, head_dim, itemsize))


def _span(tokens: int, tile: int) -> int:
    return cdiv(tokens, tile) * tile


@triton.jit(do_not_specialize=["table_width", "span"])
def _gather_kernel(
    k_cache_ptr,
    v_cache_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    cu_seqlens_ptr,
    context_ptr,
    table_width,
    span,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (TOKENS of a span, kv head, sequence); TOKENS divides TILE."""
    launch_next(PDL)
    wait_previous(PDL)
    first, kv_head, sequence = tl.program_id(0) * TOKENS, tl.program_id(1), tl.program_id(2)
    length = (tl.load(cu_seqlens_ptr + sequence + 1) - tl.load(cu_seqlens_ptr + sequence)).to(tl.int32)
    end = tl.load(context_ptr + sequence).to(tl.int32) + length
    # A sequence without queries has no tiles.
    if (length == 0) | (first >= tl.cdiv(end, TILE) * TILE):
        return
    token = first + tl.arange(0, TOKENS)
    exists = token < end
    row_table_ptr = table_ptr + sequence.to(tl.int64) * table_width
    block = tl.load(row_table_ptr + token // BLOCK_SIZE, mask=exists, other=0)
    slot = block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
    dim = tl.arange(0, HEAD_DIM)[None, :]
    offset = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim
    k = tl.load(k_cache_ptr + offset, mask=exists[:, None], other=0.0)
    v = tl.load(v_cache_ptr + offset, mask=exists[:, None], other=0.0)
    row = (kv_head * tl.num_programs(2) + sequence).to(tl.int64) * span + token
    out_offset = row[:, None] * HEAD_DIM + dim
    tl.store(k_ptr + out_offset, k.to(k_ptr.dtype.element_ty))
    tl.store(v_ptr + out_offset, v.to(v_ptr.dtype.element_ty))


@triton.jit
def _attend_keys(
    q,
    acc,
    maximum,
    total,
    query_position,
    first,
    stop,
    end,
    k_source,
    v_source,
    first_row,
    table_ptr,
    table_width,
    kv_head,
    scale,
    HEAD_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    GATHERED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Carries a softmax over the tiles from `first` to `stop`; not MASKED: every query sees all their keys.

    The scale, which is positive, is applied where the maximum is subtracted: one instruction for both.
    """
    if not GATHERED:
        block = tile_blocks(table_ptr, first, table_width, BLOCK_SIZE, TILE)
    for start in range(first, stop, TILE):
        token = start + tl.arange(0, TILE)
        if GATHERED:
            k, v = k_source.load([first_row + start, 0]), v_source.load([first_row + start, 0])
        else:
            slot = block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
            offset = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
            if MASKED:
                exists = (token < end)[:, None]
                k = tl.load(k_source + offset, mask=exists, other=0.0)
                v = tl.load(v_source + offset, mask=exists, other=0.0)
            else:
                k, v = tl.load(k_source + offset), tl.load(v_source + offset)
            block = tile_blocks(table_ptr, start + TILE, table_width, BLOCK_SIZE, TILE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            scores = tl.where(token[None, :] <= query_position[:, None], scores, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(scores * scale - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None], input_precision="ieee")
        total = total * rescale + tl.sum(weights, axis=1)
        maximum = new_maximum
    return acc, maximum, total


@triton.jit(do_not_specialize=["num_sequences", "table_width", "span"])
def _flat_attention_kernel(
    q_ptr,
    k_source,
    v_source,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    cu_seqlens_ptr,
    context_ptr,
    out_ptr,
    num_sequences,
    table_width,
    span,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_GQA: tl.constexpr,
    TILE: tl.constexpr,
    GATHERED: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (kv head, tile of a sequence's queries).

    GATHERED: the sources are descriptors of tiles; else they are the caches.
    """
    launch_next(PDL)
    wait_previous(PDL)
    GQA: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    QUERIES: tl.constexpr = ROWS // PADDED_GQA
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    sequence, first_token, length, first_query = queries_of_tile(tile, cu_seqlens_ptr, num_sequences, QUERIES)
    if first_query >= length:
        return
    context = tl.load(context_ptr + sequence).to(tl.int32)

    query = first_query + tl.arange(0, ROWS) // PADDED_GQA
    member = tl.arange(0, ROWS) % PADDED_GQA
    valid = (query < length) & (member < GQA)
    q_row = (first_token + query).to(tl.int64) * NUM_HEADS + kv_head * GQA + member
    q_offset = q_row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_offset, mask=valid[:, None], other=0.0)
    if FP8:
        scale *= tl.load(k_scale_ptr + kv_head)
    end = context + tl.minimum(length, first_query + QUERIES)
    seen_by_all = (context + first_query) // TILE * TILE
    first_row = (kv_head * num_sequences + sequence) * span
    row_table_ptr = table_ptr + sequence.to(tl.int64) * table_width
    acc, maximum, total = fresh(ROWS, HEAD_DIM)
    for MASKED in tl.static_range(2):
        acc, maximum, total = _attend_keys(
            q,
            acc,
            maximum,
            total,
            context + query,
            seen_by_all if MASKED else 0,
            end if MASKED else seen_by_all,
            end,
            k_source,
            v_source,
            first_row,
            row_table_ptr,
            table_width,
            kv_head,
            scale,
            HEAD_DIM,
            NUM_KV_HEADS,
            BLOCK_SIZE,
            TILE,
            GATHERED,
            MASKED,
        )
    out = normalised(acc, total)
    if FP8:
        out *= tl.load(v_scale_ptr + kv_head)
    tl.store(out_ptr + q_offset, out.to(out_ptr.dtype.element_ty), mask=valid[:, None])


def _gather(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table_SB: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_len_S: torch.Tensor,
    dtype: torch.dtype,
    tile: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each sequence's keys and values `[Hkv * S * span, D]`; undefined where no tile reads."""
    sequences, table_width = block_table_SB.shape
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    span = _span(table_width * block_size, tile)
    tokens = min(tile, GATHER_TOKENS)
    k, v = (
        torch.empty(num_kv_heads * sequences * span, head_dim, dtype=dtype, device=k_cache.device)
        for _ in range(2)
    )
    _gather_kernel[(span // tokens, num_kv_heads, sequences)](
        k_cache,
        v_cache,
        k,
        v,
        block_table_SB,
        cu_seqlens,
        context_len_S,
        table_width,
        span,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TOKENS=tokens,
        TILE=tile,
        **launch_options(GATHER_WARPS),
    )
    return k, v


def flat_attention_triton(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table_SB: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_len_S: torch.Tensor,
    k_scale_H: torch.Tensor | None = None,
    v_scale_H: torch.Tensor | None = None,
    gathered: bool = False,
    rows: int = QUERY_ROWS,
    tile: int = FLAT_TILE,
) -> torch.Tensor:
    """Launches the kernel; `gathered` wants TMA, and an E4M3 cache wants `gathered`."""
    num_tokens, num_heads, head_dim = q_THD.shape
    num_sequences, table_width = block_table_SB.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    padded_gqa = next_power_of_2(num_heads // num_kv_heads)
    fp8 = k_cache.dtype == E4M3
    assert gathered or not fp8, "an E4M3 cache is only read gathered"
    out = torch.empty_like(q_THD)
    rows = max(rows, padded_gqa)
    paging = block_table_SB, cu_seqlens, context_len_S
    k_source, v_source = k_cache, v_cache
    if gathered:
        k_source, v_source = (
            TensorDescriptor(x, list(x.shape), [head_dim, 1], [tile, head_dim])
            for x in _gather(k_cache, v_cache, *paging, q_THD.dtype, tile)
        )
    _flat_attention_kernel[(num_kv_heads, num_tokens // (rows // padded_gqa) + num_sequences)](
        q_THD,
        k_source,
        v_source,
        k_scale_H,
        v_scale_H,
        *paging,
        out,
        num_sequences,
        table_width,
        _span(table_width * block_size, tile),
        head_dim**-0.5 * LOG2E,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        PADDED_GQA=padded_gqa,
        TILE=tile,
        GATHERED=gathered,
        FP8=fp8,
        **flat_options(head_dim, q_THD.itemsize, rows, tile),
    )
    return out


def flat_options(head_dim: int, itemsize: int, rows: int = QUERY_ROWS, tile: int = FLAT_TILE) -> dict:
    """Returns the options of a launch; bits are not compared, so multiplications and additions are fused."""
    return launch_options(
        WARPS,
        STAGES,
        fuse_multiply_add=True,
        stage_bytes=2 * tile * head_dim * itemsize,
        held_bytes=rows * head_dim * itemsize,
    )
