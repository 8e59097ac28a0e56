"""`fp8_run_experts`: moe.py's feed-forward with the experts in FP8 and the router unquantised.

Routing is moe_routing.py's, sorting and adding up are moe.py's. A slot's product is that of fp8_linear.py,
group by group in order, whatever tile the slot lies in, so a token's bits do not depend on the other tokens
here either.
"""

import torch

from paceline.kernels.fp8_format import BlockMatrix, QuantisedRows
from paceline.kernels.fp8_linear import Fp8Tile
from paceline.kernels.fp8_quantise import quantise_rows, quantise_rows_reference
from paceline.kernels.moe import (
    ROW_TILE,
    ExpertTiles,
    combine_reference,
    combine_triton,
    sort_by_expert_triton,
    tile_slots,
)
from paceline.kernels.moe_routing import route
from paceline.kernels.swiglu import silu_multiply_quantised, silu_multiply_reference
from paceline.kernels.triton_support import cdiv, launch_next, tl, triton, wait_previous


def fp8_expert_feed_forward_reference(
    x_ME: torch.Tensor,
    router_XE: torch.Tensor,
    gate_up: BlockMatrix,
    down: BlockMatrix,
    num_choices: int,
    normalise: bool,
) -> torch.Tensor:
    """The reference of routing and `fp8_run_experts` together."""
    return fp8_experts_reference(
        x_ME, *route.reference(x_ME, router_XE, num_choices, normalise), gate_up, down
    )


def fp8_experts_reference(
    x_ME: torch.Tensor,
    weights_MK: torch.Tensor,
    experts_MK: torch.Tensor,
    gate_up: BlockMatrix,
    down: BlockMatrix,
) -> torch.Tensor:
    place_S, tile_experts = tile_slots(experts_MK.flatten(), gate_up.values.shape[0])
    rows_RE = x_ME.new_zeros(len(tile_experts) * ROW_TILE, x_ME.shape[1])
    rows_RE[place_S] = x_ME.repeat_interleave(experts_MK.shape[1], 0)
    inner_RF = silu_multiply_reference(_multiply_tiles(rows_RE, gate_up, tile_experts))
    return combine_reference(_multiply_tiles(inner_RF, down, tile_experts)[place_S], weights_MK)


def _multiply_tiles(rows_RK: torch.Tensor, weight: BlockMatrix, tile_experts: list[int]) -> torch.Tensor:
    wide_XNK = weight.dequantise() if weight.wide is None else weight.wide
    wide_RK = quantise_rows_reference(rows_RK).dequantise()
    tiles = zip(wide_RK.split(ROW_TILE), tile_experts, strict=True)
    return torch.cat([torch.nn.functional.linear(tile, wide_XNK[expert]) for tile, expert in tiles]).to(
        rows_RK.dtype
    )


def choose_fp8_expert_tile(num_slots: int, num_experts: int) -> Fp8Tile:
    """Returns the tile for the slots that an expert gets on average."""
    average = num_slots / num_experts
    if average <= 16:
        return Fp8Tile(16, 64, 4, 5)
    if average <= 96:
        return Fp8Tile(64, 64, 4, 4)
    return Fp8Tile(128, 128, 8, 3)


@triton.jit(do_not_specialize=["num_tiles", "padded_rows"])
def _fp8_expert_linear_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    slots_ptr,
    tiles_ptr,
    out_ptr,
    num_tiles,
    N,
    K,
    padded_rows,
    SLOTS_PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per tile of slots and COLS weight rows.

    Neighbouring programs, often of the same expert, share weights through L2.
    """
    launch_next(PDL)
    tile = tl.program_id(0) % num_tiles
    col_tile = tl.program_id(0) // num_tiles
    col = col_tile * COLS + tl.arange(0, COLS)
    k = tl.arange(0, 128)
    wait_previous(PDL)
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    if expert >= 0:
        place = tl.load(tiles_ptr + num_tiles + tile) + tl.arange(0, ROWS)
        row_mask = place < tl.load(tiles_ptr + 2 * num_tiles + tile)
        slot = tl.load(slots_ptr + place, mask=row_mask, other=0).to(tl.int64)
        row = slot // SLOTS_PER_ROW
        groups = K // 128
        x_ptrs = x_ptr + row[:, None] * K + k[None, :]
        weight_ptrs = weight_ptr + (expert * N + tl.minimum(col, N - 1))[:, None] * K + k[None, :]
        x_scale_ptrs = x_scales_ptr + row
        weight_scale_ptr = weight_scales_ptr + (expert * tl.cdiv(N, 128) + col_tile * COLS // 128) * groups
        x_scale = tl.load(x_scale_ptrs, mask=row_mask, other=0.0)
        weight_scale = tl.load(weight_scale_ptr)
        acc = tl.zeros((COLS, ROWS), tl.float32)
        for group in range(groups):
            scale = x_scale * weight_scale
            following = tl.minimum(group + 1, groups - 1)
            x_scale = tl.load(x_scale_ptrs + following * padded_rows, mask=row_mask, other=0.0)
            weight_scale = tl.load(weight_scale_ptr + following)
            weight = tl.load(weight_ptrs)
            x = tl.load(x_ptrs, mask=row_mask[:, None], other=0.0)
            weight_ptrs += 128
            x_ptrs += 128
            acc += tl.dot(weight, tl.trans(x)) * scale[None, :]
        out = tl.trans(acc).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + slot[:, None] * N + col[None, :], out, mask=row_mask[:, None] & (col < N)[None, :])


def fp8_expert_linear_triton(
    x: QuantisedRows, weight: BlockMatrix, tiles: ExpertTiles, tile: Fp8Tile
) -> torch.Tensor:
    """Multiplies each slot's row by its expert's weight, `[S, N]`; x has a row per token or per slot."""
    depth, width = x.values_MK.shape[1], weight.values.shape[1]
    num_slots, num_tiles = len(tiles.slots_S), tiles.tiles_3T.shape[1]
    out_SN = torch.empty(num_slots, width, dtype=x.dtype, device=x.values_MK.device)
    _fp8_expert_linear_kernel[(num_tiles * cdiv(width, tile.cols),)](
        x.values_MK,
        x.scales_GM,
        weight.values,
        weight.scales,
        tiles.slots_S,
        tiles.tiles_3T,
        out_SN,
        num_tiles,
        width,
        depth,
        x.scales_GM.shape[1],
        SLOTS_PER_ROW=num_slots // x.num_rows,
        ROWS=tiles.rows,
        COLS=tile.cols,
        **tile.options(),
    )
    return out_SN


def fp8_experts_triton(
    x: QuantisedRows,
    weights_MK: torch.Tensor,
    experts_MK: torch.Tensor,
    gate_up: BlockMatrix,
    down: BlockMatrix,
    tile: Fp8Tile,
) -> torch.Tensor:
    tiles = sort_by_expert_triton(experts_MK, gate_up.values.shape[0], tile.rows)
    inner = silu_multiply_quantised(fp8_expert_linear_triton(x, gate_up, tiles, tile))
    return combine_triton(fp8_expert_linear_triton(inner, down, tiles, tile), weights_MK)


def fp8_run_experts(
    x_ME: torch.Tensor,
    weights_MK: torch.Tensor,
    experts_MK: torch.Tensor,
    gate_up: BlockMatrix,
    down: BlockMatrix,
) -> torch.Tensor:
    """Returns the sum over a token's chosen experts of weight x down(silu(gate) * up), `[M, E]`.

    The experts come from `moe_routing.route`; `gate_up` is `[X, 2F, E]`, `down` `[X, E, F]`.
    """
    if not x_ME.is_cuda:
        return fp8_experts_reference(x_ME, weights_MK, experts_MK, gate_up, down)
    tile = choose_fp8_expert_tile(experts_MK.numel(), gate_up.values.shape[0])
    return fp8_experts_triton(quantise_rows(x_ME), weights_MK, experts_MK, gate_up, down, tile)
