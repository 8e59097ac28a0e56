"""The online softmax that both attention kernels carry over tiles of keys; it decides a query's bits.

A product's 16 or 64 left rows are queries in prefill, which has many, and keys in decoding, which has few:
with the heads of a GQA group 4 or 8, and a tensor core takes 8 right rows. Either way an element is the same
sum in the same order.

    keys    | tile tile tile tile | tile tile tile tile | tile ..     boundaries are absolute positions
            |       group 0       |       group 1       | group 2
    group  = online softmax over its tiles in order, from a fresh state
    result = fold(fold(group 0, group 1), group 2)

Row sums go through the tensor core like everything else, because the order of a plain reduction depends on
the layout the compiler picks. Masked keys add exact zeros.

A cache in E4M3 has a scale per kv head for K and for V, read from the device: K's joins the softmax scale,
V's is applied to the result. The products run in float16, which holds every E4M3 number. V is transposed on
its way out of shared memory, which the hardware does for 16 bits and not for 8. So V is read in pairs of
neighbouring dimensions, and even and odd ones have a sum each.

Bits are the same only where both kernels load an operand in the same width: that decides how the compiler
(Triton 3.6) deals a product's terms to its instructions. Prefill of an E4M3 cache also keeps to tiles of few
rows: in higher ones the products run asynchronously, and an operand made in registers was seen to be
overwritten by the next.

The queries are never stored, so quantising them would save nothing.
"""

from typing import Any, NamedTuple

from paceline.kernels.triton_support import INTERPRETED, tl, triton

# Keys per step of the online softmax.
TILE = 64
# Keys per partial result.
GROUP = 256
# log2(e): turns natural exponents into those of base 2.
LOG2E = 1.4426950408889634
# The interpreter has none of the GPU's own instructions.
EMULATED = tl.constexpr(INTERPRETED)


class AttentionShape(NamedTuple):
    """What attention's kernels are compiled for."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    # Pairs of a query and a head of the group that a program takes; heads of a group, as many as it has room.
    rows: int
    padded_gqa: int
    # Whether the cache is E4M3, so that V comes in pairs.
    fp8: bool
    tile: int = TILE
    group: int = GROUP


class Keys(NamedTuple):
    """Where a kernel reads the keys and values of one head; `scale` turns scores into base-2 exponents."""

    k_cache_ptr: Any
    v_cache_ptr: Any
    kv_head: Any
    scale: Any


@triton.jit
def tile_blocks(table_ptr, start, table_width, SHAPE: tl.constexpr):
    """Returns the block of each of the keys of the tile from `start`.

    Loaded one tile ahead: the compiler pipelines only loads whose addresses do not wait for another load of
    the same step.
    """
    index = (start + tl.arange(0, SHAPE.tile)) // SHAPE.block_size
    return tl.load(table_ptr + index, mask=index < table_width, other=0)


@triton.jit
def attend_tile(q, state, query_position, start, end, block, keys, SHAPE: tl.constexpr):
    """Carries the softmax of `q [rows, head_dim]` over the keys of the tile from `start`.

    The state is (unnormalised sum, maximum, total weight). The total has equal columns; the sum is a tuple,
    of one tensor or, where V comes in pairs, of the even and the odd dimensions.

    Keys from `end` on do not exist. A tile that begins a group discards what was before: a maximum of -inf
    gives it the factor 0. A tile whose keys are all masked changes no bit.
    """
    TILE: tl.constexpr = SHAPE.tile
    DIM: tl.constexpr = SHAPE.head_dim
    acc, maximum, total = state
    token = start + tl.arange(0, TILE)
    exists = token < end
    slot = block.to(tl.int64) * SHAPE.block_size + token % SHAPE.block_size
    offset = (slot * SHAPE.kv_heads + keys.kv_head)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    k = tl.load(keys.k_cache_ptr + offset, mask=exists[:, None], other=0.0).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * keys.scale
    scores = tl.where(token[None, :] <= query_position[:, None], scores, -float("inf"))
    new_maximum, finite, rescale = _next_maximum(maximum, tl.max(scores, axis=1), start, SHAPE.group)
    weights = tl.exp2(scores - finite[:, None]).to(q.dtype)
    if SHAPE.fp8:
        HALF: tl.constexpr = DIM // 2
        v_offset = (slot * SHAPE.kv_heads + keys.kv_head)[:, None] * HALF + tl.arange(0, HALF)[None, :]
        even, odd = _halves_of(tl.load(keys.v_cache_ptr + v_offset, mask=exists[:, None], other=0))
        even_acc = tl.dot(weights, even.to(q.dtype), acc[0] * rescale[:, None], input_precision="ieee")
        acc = even_acc, tl.dot(weights, odd.to(q.dtype), acc[1] * rescale[:, None], input_precision="ieee")
    else:
        v = tl.load(keys.v_cache_ptr + offset, mask=exists[:, None], other=0.0)
        acc = (tl.dot(weights, v, acc[0] * rescale[:, None], input_precision="ieee"),)
    tile_total = tl.dot(weights, tl.full((TILE, total.shape[1]), 1.0, q.dtype), input_precision="ieee")
    # The maximum changes nothing. It keeps the compiler from adding inside the product, which serialises the
    # two products.
    total = total * rescale[:, None] + tl.maximum(tile_total, 0.0)
    return acc, new_maximum, total


@triton.jit
def attend_keys(q, state, query_position, start, end, block, keys, SHAPE: tl.constexpr):
    """Does what `attend_tile` does, transposed: `q` is `[head_dim, rows]`, and the total has equal rows."""
    slot = block.to(tl.int64) * SHAPE.block_size + (start + tl.arange(0, SHAPE.tile)) % SHAPE.block_size
    return attend_slots(q, state, query_position, start, end, slot, keys, SHAPE)


@triton.jit
def attend_slots(q, state, query_position, start, end, slot, keys, SHAPE: tl.constexpr):
    """Does what `attend_keys` does, for keys that lie in these cache slots."""
    TILE: tl.constexpr = SHAPE.tile
    DIM: tl.constexpr = SHAPE.head_dim
    acc, maximum, total = state
    token = start + tl.arange(0, TILE)
    exists = token < end
    slot = slot * SHAPE.kv_heads + keys.kv_head
    k_offset = slot[:, None] * DIM + tl.arange(0, DIM)[None, :]
    k = tl.load(keys.k_cache_ptr + k_offset, mask=exists[:, None], other=0.0).to(q.dtype)
    scores = tl.dot(k, q, input_precision="ieee") * keys.scale
    scores = tl.where(token[:, None] <= query_position[None, :], scores, -float("inf"))
    new_maximum, finite, rescale = _next_maximum(maximum, tl.max(scores, axis=0), start, SHAPE.group)
    weights = tl.exp2(scores - finite[None, :]).to(q.dtype)
    if SHAPE.fp8:
        HALF: tl.constexpr = DIM // 2
        v_offset = slot[None, :] * HALF + tl.arange(0, HALF)[:, None]
        even, odd = _halves_of(tl.load(keys.v_cache_ptr + v_offset, mask=exists[None, :], other=0))
        even_acc = tl.dot(even.to(q.dtype), weights, acc[0] * rescale[None, :], input_precision="ieee")
        acc = even_acc, tl.dot(odd.to(q.dtype), weights, acc[1] * rescale[None, :], input_precision="ieee")
    else:
        v_offset = slot[None, :] * DIM + tl.arange(0, DIM)[:, None]
        v = tl.load(keys.v_cache_ptr + v_offset, mask=exists[None, :], other=0.0).to(q.dtype)
        acc = (tl.dot(v, weights, acc[0] * rescale[None, :], input_precision="ieee"),)
    tile_total = tl.dot(tl.full((total.shape[0], TILE), 1.0, q.dtype), weights, input_precision="ieee")
    # The maximum is there for the compiler, as in `attend_tile`.
    total = total * rescale[None, :] + tl.maximum(tile_total, 0.0)
    return acc, new_maximum, total


@triton.jit
def _next_maximum(maximum, tile_maximum, start, GROUP: tl.constexpr):
    """Returns the maximum after a tile, the same with 0 for -inf, and the factor for what was before."""
    maximum = tl.where(start % GROUP == 0, -float("inf"), maximum)
    new_maximum = tl.maximum(maximum, tile_maximum)
    finite = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    return new_maximum, finite, tl.exp2(maximum - finite)


@triton.jit
def _halves_of(pairs):
    """Returns pairs of E4M3 numbers in int16 as float16, the lower and the upper ones.

    On a GPU that takes three instructions for two pairs; the compiler finds nothing better than ten for one.
    """
    if EMULATED:
        lower = (((pairs & 0x80) << 8) | ((pairs & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        upper = ((pairs & -0x8000) | ((pairs & 0x7F00) >> 1)).to(tl.float16, bitcast=True) * 256.0
    else:
        lower, upper = tl.inline_asm_elementwise(
            "{ .reg .b32 sorted; .reg .b16 lower, upper;"
            " prmt.b32 sorted, $2, 0, 0x3120; mov.b32 {lower, upper}, sorted;"
            "  cvt.rn.f16x2.e4m3x2 $0, lower; cvt.rn.f16x2.e4m3x2 $1, upper; }",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return lower, upper


@triton.jit
def as_fp8_query(q):
    """Returns q in the type that products with an E4M3 cache run in: float16, or float32 as it is."""
    PRODUCT: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.float16
    return tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(PRODUCT)


@triton.jit
def fresh(ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Returns the state of a softmax that has seen nothing: sum, maximum, total."""
    acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    return acc, tl.full((ROWS,), -float("inf"), tl.float32), tl.zeros((ROWS,), tl.float32)


@triton.jit
def fresh_group(SHAPE: tl.constexpr):
    """Returns the same for `attend_tile`, where the sum is a tuple and the total has equal columns.

    The total is one result of the tensor core, reduced once per group. It has more columns than rows: for a
    square result the compiler would stack the warps over 16 rows.
    """
    ROWS: tl.constexpr = SHAPE.rows
    COLUMNS: tl.constexpr = 16 if ROWS >= 64 else 2 * ROWS
    acc = _fresh_sum(ROWS, SHAPE.head_dim, SHAPE.fp8, False)
    return acc, tl.full((ROWS,), -float("inf"), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)


@triton.jit
def fresh_keys(SHAPE: tl.constexpr):
    """Returns the same for `attend_keys`."""
    ROWS: tl.constexpr = SHAPE.rows
    acc = _fresh_sum(ROWS, SHAPE.head_dim, SHAPE.fp8, True)
    return acc, tl.full((ROWS,), -float("inf"), tl.float32), tl.zeros((16, ROWS), tl.float32)


@triton.jit
def _fresh_sum(ROWS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, TRANSPOSED: tl.constexpr):
    WIDTH: tl.constexpr = DIM // 2 if PAIRS else DIM
    piece = tl.zeros((WIDTH, ROWS) if TRANSPOSED else (ROWS, WIDTH), tl.float32)
    if PAIRS:
        acc = piece, piece
    else:
        acc = (piece,)
    return acc


@triton.jit
def whole(state, SHAPE: tl.constexpr):
    """Returns a group's state as `fold` takes it: the sum in one piece, each row's total once."""
    acc, maximum, total = state
    return _joined(acc, SHAPE.fp8), maximum, tl.max(total, axis=1)


@triton.jit
def by_rows(state, SHAPE: tl.constexpr):
    """Returns the same of a group by `attend_keys`, transposed back."""
    acc, maximum, total = state
    if SHAPE.fp8:
        acc = tl.trans(acc[0]), tl.trans(acc[1])
    else:
        acc = (tl.trans(acc[0]),)
    return _joined(acc, SHAPE.fp8), maximum, tl.max(total, axis=0)


@triton.jit
def _joined(acc, PAIRS: tl.constexpr):
    if PAIRS:
        out = tl.reshape(tl.join(acc[0], acc[1]), (acc[0].shape[0], 2 * acc[0].shape[1]))
    else:
        out = acc[0]
    return out


@triton.jit
def fold(state, group):
    """Adds one group's result to what the groups before it gave; adding an empty group changes no bit."""
    acc, maximum, total = state
    group_acc, group_maximum, group_total = group
    new_maximum = tl.maximum(maximum, group_maximum)
    finite = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    old, new = tl.exp2(maximum - finite), tl.exp2(group_maximum - finite)
    acc = acc * tl.expand_dims(old, -1) + group_acc * tl.expand_dims(new, -1)
    return acc, new_maximum, total * old + group_total * new


@triton.jit
def normalised(state):
    """Returns the sum over its total weight; zeros where nothing was seen."""
    acc, _, total = state
    total = tl.expand_dims(total, -1)
    return tl.where(total > 0, acc / tl.where(total > 0, total, 1.0), 0.0)
