"""`expert_feed_forward`: a router sends each token to K of X feed-forwards and adds up what they return.

    slot = token * K + k: one of a token's K choices          M = 3 tokens, K = 2, tiles of 2 rows

    token          0     1     2
    expert         3 1   0 3   1 3                            slots sorted by expert   [ 2 | 1 4 | 0 3 5 ]
    slot           0 1   2 3   4 5                            tiles                      0   1     3   3

A token's bits must not depend on the other tokens, nor on how many of them chose the same expert. A slot's
product is therefore accumulated over the depth in one order, whatever tile it lies in and wherever (as in
linear.py), is written to the slot's own row, and a token's K rows are added in the order of its choices.

- CPU: each expert's rows run in tiles of exactly ROW_TILE rows, padded with zeros, so that BLAS always sees
  the same shape.
- GPU: seven launches. The sort runs on the device and the grid is sized for the worst case (programs without
  a tile end at once), so shapes depend on M alone: no host synchronisation, and CUDA graphs can capture it.

`moe_routing.py` chooses the experts. Shape letters: M tokens, X experts, K choices per token (in names of
weights: depth), S = M x K slots, E hidden size, F inner size.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from paceline.kernels.linear import Tile
from paceline.kernels.moe_routing import add_in_order, route
from paceline.kernels.operation import cdiv, next_power_of_2, reference_of
from paceline.kernels.swiglu import silu_multiply, silu_multiply_reference
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous

# Rows of a tile on a CPU: an expert rarely has many.
ROW_TILE = 8
# Slots that a sorting program reads together.
SORT_BLOCK = 1024
# Columns that a combining program adds up.
COMBINE_BLOCK = 1024


def tile_slots(experts_S: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, list[int]]:
    """Returns each slot's row when every expert's slots fill tiles of their own, and each tile's expert."""
    counts_X = experts_S.bincount(minlength=num_experts)
    tiles_X = (counts_X + ROW_TILE - 1) // ROW_TILE
    first_row_X = (tiles_X.cumsum(0) - tiles_X) * ROW_TILE
    sorted_S, order_S = experts_S.sort(stable=True)
    rank_S = torch.arange(len(experts_S)) - (counts_X.cumsum(0) - counts_X)[sorted_S]
    place_S = torch.empty_like(order_S).index_copy_(0, order_S, first_row_X[sorted_S] + rank_S)
    return place_S, torch.arange(num_experts).repeat_interleave(tiles_X).tolist()


def _multiply_tiles(rows_RK: torch.Tensor, weight_XNK: torch.Tensor, tile_experts: list[int]) -> torch.Tensor:
    weights = weight_XNK.unbind()
    return torch.cat(
        [
            F.linear(tile, weights[expert])
            for tile, expert in zip(rows_RK.split(ROW_TILE), tile_experts, strict=True)
        ]
    )


def combine_reference(out_SE: torch.Tensor, weights_MK: torch.Tensor) -> torch.Tensor:
    """Adds up the weighted results of each token's slots, in the order of its choices."""
    wide = torch.float64 if out_SE.dtype == torch.float64 else torch.float32
    weighted_MKE = out_SE.to(wide).unflatten(0, weights_MK.shape) * weights_MK.to(wide).unsqueeze(-1)
    return add_in_order(weighted_MKE.unbind(1)).to(out_SE.dtype)


@dataclass(frozen=True)
class ExpertTiles:
    """Slots sorted by expert, cut into tiles of at most `rows` slots of one expert; all on the device."""

    slots_S: torch.Tensor
    # Each tile's expert (-1: no such tile), and where in `slots_S` it starts and stops.
    tiles_3T: torch.Tensor
    rows: int


@triton.jit(do_not_specialize=["num_slots", "num_tiles"])
def _sort_kernel(
    experts_ptr,
    out,
    num_slots,
    num_tiles,
    X,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per expert counts all slots, then places its own; one more marks the unused tiles."""
    launch_next(PDL)
    slots_ptr, tiles_ptr = out
    mine = tl.program_id(0)
    expert, within = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK)
    wait_previous(PDL)
    counts = tl.zeros((BLOCK_X,), tl.int32)
    for first in range(0, num_slots, BLOCK):
        chosen = tl.load(experts_ptr + first + within, mask=first + within < num_slots, other=X)
        counts += tl.histogram(chosen, BLOCK_X)
    counts = tl.where(expert < X, counts, 0)
    tiles = (counts + ROWS - 1) // ROWS
    start = tl.sum(tl.where(expert < mine, counts, 0), axis=0)
    stop = start + tl.sum(tl.where(expert == mine, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(expert < mine, tiles, 0), axis=0)
    place = start
    for first in range(0, num_slots, BLOCK):
        slot = first + within
        chosen = tl.load(experts_ptr + slot, mask=slot < num_slots, other=-1)
        is_mine = (chosen == mine).to(tl.int32)
        tl.store(slots_ptr + place + tl.cumsum(is_mine, axis=0) - 1, slot, mask=is_mine != 0)
        place += tl.sum(is_mine, axis=0)
    last_tile = tl.where(mine < X, first_tile + (stop - start + ROWS - 1) // ROWS, num_tiles)
    for first in range(first_tile, last_tile, BLOCK):
        tile = first + within
        tile_start = start + (tile - first_tile) * ROWS
        tl.store(tiles_ptr + tile, tl.where(mine < X, mine, -1), mask=tile < last_tile)
        tl.store(tiles_ptr + num_tiles + tile, tile_start, mask=tile < last_tile)
        tl.store(tiles_ptr + 2 * num_tiles + tile, tl.minimum(tile_start + ROWS, stop), mask=tile < last_tile)


def sort_by_expert_triton(experts_MK: torch.Tensor, num_experts: int, rows: int) -> ExpertTiles:
    """Sorts slots by expert and cuts them into tiles of `rows`, without the host."""
    num_slots = experts_MK.numel()
    # Of every expert, all tiles but one are full.
    num_tiles = (num_slots + (rows - 1) * min(num_experts, num_slots)) // rows
    slots_S = torch.empty(num_slots, dtype=torch.int32, device=experts_MK.device)
    tiles_3T = torch.empty(3, num_tiles, dtype=torch.int32, device=experts_MK.device)
    block = min(SORT_BLOCK, max(32, next_power_of_2(num_slots)))
    _sort_kernel[(num_experts + 1,)](
        experts_MK,
        (slots_S, tiles_3T),
        num_slots,
        num_tiles,
        num_experts,
        ROWS=rows,
        BLOCK=block,
        BLOCK_X=next_power_of_2(num_experts + 1),
        **launch_options(num_warps=max(1, block // 256)),
    )
    return ExpertTiles(slots_S, tiles_3T, rows)


def choose_expert_tile(num_slots: int, num_experts: int) -> Tile:
    """Returns the tile for the slots that an expert gets on average, by times of Qwen3-30B-A3B on an H200.

    Decoding (top 8 of 128: up to 256 tokens) reads weights and little else. Experts get more and less than
    the average, and one with more than a tile's rows is read again.
    """
    average = num_slots / num_experts
    if average <= 10:
        return Tile(16, 64, 128, 4, 4)
    if average <= 24:
        return Tile(32, 128, 128, 4, 2)
    if average <= 96:
        return Tile(64, 64, 128, 4, 4)
    return Tile(128, 128, 64, 8, 4)


@triton.jit(do_not_specialize=["num_tiles"])
def _expert_linear_kernel(
    x_ptr,
    weight_ptr,
    slots_ptr,
    tiles_ptr,
    out_ptr,
    num_tiles,
    N,
    K: tl.constexpr,
    SLOTS_PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per tile of slots and COLS weight rows.

    Neighbouring programs, often of the same expert, share weights through L2.
    """
    launch_next(PDL)
    tile = tl.program_id(0) % num_tiles
    col = tl.program_id(0) // num_tiles * COLS + tl.arange(0, COLS)
    k = tl.arange(0, DEPTH)
    wait_previous(PDL)
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    if expert >= 0:
        place = tl.load(tiles_ptr + num_tiles + tile) + tl.arange(0, ROWS)
        row_mask, col_mask = place < tl.load(tiles_ptr + 2 * num_tiles + tile), (col < N)[None, :]
        slot = tl.load(slots_ptr + place, mask=row_mask, other=0).to(tl.int64)
        row_mask = row_mask[:, None]
        x_ptrs = x_ptr + (slot // SLOTS_PER_ROW)[:, None] * K + k[None, :]
        weight_ptrs = weight_ptr + (expert * N + col)[None, :] * K + k[:, None]
        acc = tl.zeros((ROWS, COLS), tl.float32)
        for _ in range(K // DEPTH):
            x = tl.load(x_ptrs, mask=row_mask, other=0.0)
            weight = tl.load(weight_ptrs, mask=col_mask, other=0.0)
            acc = tl.dot(x, weight, acc, input_precision="ieee")
            x_ptrs += DEPTH
            weight_ptrs += DEPTH
        tl.store(
            out_ptr + slot[:, None] * N + col[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=row_mask & col_mask,
        )


def expert_linear_triton(
    x_RK: torch.Tensor, weight_XNK: torch.Tensor, tiles: ExpertTiles, tile: Tile
) -> torch.Tensor:
    """Multiplies each slot's row by its expert's weight, `[S, N]`; x has a row per token or per slot."""
    num_rows, depth = x_RK.shape
    width = weight_XNK.shape[1]
    num_slots = len(tiles.slots_S)
    num_tiles = tiles.tiles_3T.shape[1]
    # A shallower tile gives the same bits.
    while depth % tile.depth:
        tile = replace(tile, depth=tile.depth // 2)
    out_SN = torch.empty(num_slots, width, dtype=x_RK.dtype, device=x_RK.device)
    _expert_linear_kernel[(num_tiles * cdiv(width, tile.cols),)](
        x_RK,
        weight_XNK,
        tiles.slots_S,
        tiles.tiles_3T,
        out_SN,
        num_tiles,
        width,
        K=depth,
        SLOTS_PER_ROW=num_slots // num_rows,
        ROWS=tiles.rows,
        COLS=tile.cols,
        DEPTH=tile.depth,
        **tile.options(x_RK.itemsize),
    )
    return out_SN


@triton.jit
def _combine_kernel(
    slots_ptr, weights_ptr, out_ptr, E, CHOICES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program per token and BLOCK columns."""
    launch_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < E
    wait_previous(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(CHOICES):
        weight = tl.load(weights_ptr + row * CHOICES + k).to(tl.float32)
        total += weight * tl.load(slots_ptr + (row * CHOICES + k) * E + column, mask=mask, other=0.0).to(
            tl.float32
        )
    tl.store(out_ptr + row * E + column, total.to(out_ptr.dtype.element_ty), mask=mask)


def combine_triton(out_SE: torch.Tensor, weights_MK: torch.Tensor) -> torch.Tensor:
    (num_rows, num_choices), width = weights_MK.shape, out_SE.shape[1]
    out_ME = torch.empty(num_rows, width, dtype=out_SE.dtype, device=out_SE.device)
    options = dict(CHOICES=num_choices, BLOCK=COMBINE_BLOCK, **launch_options(num_warps=4))
    _combine_kernel[(num_rows, cdiv(width, COMBINE_BLOCK))](out_SE, weights_MK, out_ME, width, **options)
    return out_ME


def experts_triton(x_ME, weights_MK, experts_MK, gate_up_XNE, down_XEF, tile=None):
    tile = tile or choose_expert_tile(experts_MK.numel(), gate_up_XNE.shape[0])
    tiles = sort_by_expert_triton(experts_MK, gate_up_XNE.shape[0], tile.rows)
    gate_up_SN = expert_linear_triton(x_ME, gate_up_XNE, tiles, tile)
    out_SE = expert_linear_triton(silu_multiply(gate_up_SN), down_XEF, tiles, tile)
    return combine_triton(out_SE, weights_MK)


@reference_of(experts_triton)
def run_experts(
    x_ME: torch.Tensor,
    weights_MK: torch.Tensor,
    experts_MK: torch.Tensor,
    gate_up_XNE: torch.Tensor,
    down_XEF: torch.Tensor,
) -> torch.Tensor:
    """Returns `expert_feed_forward` of tokens that have been routed."""
    place_S, tile_experts = tile_slots(experts_MK.flatten(), len(gate_up_XNE))
    rows_RE = x_ME.new_zeros(len(tile_experts) * ROW_TILE, x_ME.shape[1])
    rows_RE[place_S] = x_ME.repeat_interleave(experts_MK.shape[1], 0)
    inner_RF = silu_multiply_reference(_multiply_tiles(rows_RE, gate_up_XNE, tile_experts))
    return combine_reference(_multiply_tiles(inner_RF, down_XEF, tile_experts)[place_S], weights_MK)


def expert_feed_forward(
    x_ME: torch.Tensor,
    router_XE: torch.Tensor,
    gate_up_XNE: torch.Tensor,
    down_XEF: torch.Tensor,
    num_choices: int,
    normalise: bool,
) -> torch.Tensor:
    """Returns the sum over a token's chosen experts of weight x down(silu(gate) * up), `[M, E]`.

    On the GPU all tensors are contiguous and 16-bit, and E and F are multiples of 16. The router's scores
    stay in float32.
    """
    return run_experts(x_ME, *route(x_ME, router_XE, num_choices, normalise), gate_up_XNE, down_XEF)
