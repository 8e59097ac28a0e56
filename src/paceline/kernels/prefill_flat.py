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

from paceline.kernels.attention_tiles import LOG2E, AttentionShape, fresh, normalised, tile_blocks
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
    cache, out, packing, table_width, span, SHAPE: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr
):
    """Programs (TOKENS of a span, kv head, sequence); TOKENS divides a tile."""
    launch_next(PDL)
    wait_previous(PDL)
    table_ptr, cu_seqlens_ptr, context_ptr = packing
    first, kv_head, sequence = tl.program_id(0) * TOKENS, tl.program_id(1), tl.program_id(2)
    length = (tl.load(cu_seqlens_ptr + sequence + 1) - tl.load(cu_seqlens_ptr + sequence)).to(tl.int32)
    end = tl.load(context_ptr + sequence).to(tl.int32) + length
    # A sequence without queries has no tiles.
    if (length == 0) | (first >= tl.cdiv(end, SHAPE.tile) * SHAPE.tile):
        return
    token = first + tl.arange(0, TOKENS)
    exists = token < end
    row_table_ptr = table_ptr + sequence.to(tl.int64) * table_width
    block = tl.load(row_table_ptr + token // SHAPE.block_size, mask=exists, other=0)
    slot = block.to(tl.int64) * SHAPE.block_size + token % SHAPE.block_size
    dim = tl.arange(0, SHAPE.head_dim)[None, :]
    offset = (slot * SHAPE.kv_heads + kv_head)[:, None] * SHAPE.head_dim + dim
    k = tl.load(cache[0] + offset, mask=exists[:, None], other=0.0)
    v = tl.load(cache[1] + offset, mask=exists[:, None], other=0.0)
    row = (kv_head * tl.num_programs(2) + sequence).to(tl.int64) * span + token
    out_offset = row[:, None] * SHAPE.head_dim + dim
    tl.store(out[0] + out_offset, k.to(out[0].dtype.element_ty))
    tl.store(out[1] + out_offset, v.to(out[1].dtype.element_ty))


@triton.jit
def _attend_keys(
    q,
    state,
    position,
    first,
    stop,
    end,
    source,
    SHAPE: tl.constexpr,
    GATHERED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Carries a softmax over the tiles from `first` to `stop`; not MASKED: every query sees all their keys.

    `source` is where keys and values are: both, the head, the sequence's first gathered row, its block table
    and the table's width, and the scale. The latter, which is positive, is applied where the maximum is
    subtracted: one instruction for both.
    """
    DIM: tl.constexpr = SHAPE.head_dim
    k_source, v_source, kv_head, first_row, table_ptr, table_width, scale = source
    acc, maximum, total = state
    if not GATHERED:
        block = tile_blocks(table_ptr, first, table_width, SHAPE)
    for start in range(first, stop, SHAPE.tile):
        token = start + tl.arange(0, SHAPE.tile)
        if GATHERED:
            k, v = k_source.load([first_row + start, 0]), v_source.load([first_row + start, 0])
        else:
            slot = block.to(tl.int64) * SHAPE.block_size + token % SHAPE.block_size
            offset = (slot * SHAPE.kv_heads + kv_head)[:, None] * DIM + tl.arange(0, DIM)[None, :]
            if MASKED:
                exists = (token < end)[:, None]
                k = tl.load(k_source + offset, mask=exists, other=0.0)
                v = tl.load(v_source + offset, mask=exists, other=0.0)
            else:
                k, v = tl.load(k_source + offset), tl.load(v_source + offset)
            block = tile_blocks(table_ptr, start + SHAPE.tile, table_width, SHAPE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            scores = tl.where(token[None, :] <= position[:, None], scores, -float("inf"))
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
    scales,
    packing,
    out_ptr,
    num_sequences,
    table_width,
    span,
    scale,
    SHAPE: tl.constexpr,
    GATHERED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (kv head, tile of a sequence's queries).

    GATHERED: the sources are descriptors of tiles; else they are the caches.
    """
    launch_next(PDL)
    wait_previous(PDL)
    k_scale_ptr, v_scale_ptr = scales
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
        scale *= tl.load(k_scale_ptr + kv_head)
    end = context + tl.minimum(length, first_query + QUERIES)
    seen_by_all = (context + first_query) // SHAPE.tile * SHAPE.tile
    first_row = (kv_head * num_sequences + sequence) * span
    row_table_ptr = table_ptr + sequence.to(tl.int64) * table_width
    source = k_source, v_source, kv_head, first_row, row_table_ptr, table_width, scale
    state = fresh(SHAPE.rows, SHAPE.head_dim)
    state = _attend_keys(q, state, context + query, 0, seen_by_all, end, source, SHAPE, GATHERED, False)
    state = _attend_keys(q, state, context + query, seen_by_all, end, end, source, SHAPE, GATHERED, True)
    out = normalised(state)
    if SHAPE.fp8:
        out *= tl.load(v_scale_ptr + kv_head)
    tl.store(out_ptr + q_offset, out.to(out_ptr.dtype.element_ty), mask=valid[:, None])


def _gather(cache, packing, shape, dtype):
    """Returns each sequence's keys and values `[Hkv * S * span, D]`; undefined where no tile reads."""
    sequences, table_width = packing[0].shape
    span = _span(table_width * shape.block_size, shape.tile)
    tokens = min(shape.tile, GATHER_TOKENS)
    rows, device = shape.kv_heads * sequences * span, cache[0].device
    gathered = tuple(torch.empty(rows, shape.head_dim, dtype=dtype, device=device) for _ in range(2))
    grid = span // tokens, shape.kv_heads, sequences
    _gather_kernel[grid](
        cache,
        gathered,
        packing,
        table_width,
        span,
        SHAPE=shape,
        TOKENS=tokens,
        **launch_options(GATHER_WARPS),
    )
    return gathered


def flat_attention_triton(
    q_THD,
    k_cache,
    v_cache,
    block_table_SB,
    cu_seqlens,
    context_len_S,
    k_scale_H=None,
    v_scale_H=None,
    gathered=False,
    rows=QUERY_ROWS,
    tile=FLAT_TILE,
):
    """Launches the kernel; `gathered` wants TMA, and an E4M3 cache wants `gathered`."""
    num_tokens, num_heads, head_dim = q_THD.shape
    num_sequences, table_width = block_table_SB.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    padded_gqa = next_power_of_2(num_heads // num_kv_heads)
    fp8 = k_cache.dtype == E4M3
    assert gathered or not fp8, "an E4M3 cache is only read gathered"
    out = torch.empty_like(q_THD)
    rows = max(rows, padded_gqa)
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, block_size, rows, padded_gqa, fp8, tile)
    packing = block_table_SB, cu_seqlens, context_len_S
    sources = k_cache, v_cache
    if gathered:
        sources = (
            TensorDescriptor(x, list(x.shape), [head_dim, 1], [tile, head_dim])
            for x in _gather(sources, packing, shape, q_THD.dtype)
        )
    _flat_attention_kernel[(num_kv_heads, num_tokens // (rows // padded_gqa) + num_sequences)](
        q_THD,
        *sources,
        (k_scale_H, v_scale_H),
        packing,
        out,
        num_sequences,
        table_width,
        _span(table_width * block_size, tile),
        head_dim**-0.5 * LOG2E,
        SHAPE=shape,
        GATHERED=gathered,
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
