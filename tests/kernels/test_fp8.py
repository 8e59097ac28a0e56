"""FP8 kernels: quantisers to the bit of the formula, products against float64, row invariance."""

import math

import pytest
import torch

from paceline.kernels import fp8_quantise_many
from paceline.kernels.fp8_format import E4M3, BlockMatrix, QuantisedRows, from_e4m3, scale_of
from paceline.kernels.fp8_linear import (
    Fp8Tile,
    choose_fp8_tile,
    choose_parts,
    fp8_linear_reference,
    fp8_linear_triton,
)
from paceline.kernels.fp8_moe import (
    choose_fp8_expert_tile,
    fp8_expert_feed_forward_reference,
    fp8_experts_triton,
)
from paceline.kernels.fp8_quantise import (
    quantise_blocks_reference,
    quantise_blocks_triton,
    quantise_rows_reference,
    quantise_rows_triton,
)
from paceline.kernels.fp8_quantise_many import BlockQuantiser, WeightUpdate, quantise_many_triton
from paceline.kernels.linear import linear_reference
from paceline.kernels.moe import expert_feed_forward
from paceline.kernels.moe_routing import route_reference
from paceline.kernels.norm import rms_norm_residual, rms_norm_triton
from paceline.kernels.swiglu import silu_multiply_quantised_triton, silu_multiply_triton
from tests.kernels.cases import first

SHAPES = [(384, 256), (200, 320), (96, 48)]
GPU_TILES = [
    Fp8Tile(16, 64, 4, 8),
    Fp8Tile(16, 64, 4, 6),
    Fp8Tile(32, 64, 4, 8),
    Fp8Tile(32, 64, 4, 6),
    Fp8Tile(64, 64, 4, 6),
    Fp8Tile(64, 64, 4, 4),
    Fp8Tile(16, 128, 4, 4),
    Fp8Tile(128, 64, 4, 3, tma=True),
    Fp8Tile(128, 64, 4, 4, tma=True),
    Fp8Tile(128, 128, 8, 3, tma=True),
    Fp8Tile(64, 128, 4, 4, tma=True),
]


def scalar_e4m3(x: float) -> float:
    """The nearest E4M3 number, ties to the even mantissa, by looking at all of them."""
    numbers = sorted({float(n) for n in from_e4m3(torch.arange(256, dtype=torch.uint8).view(E4M3)) if n == n})
    distances = [abs(n - x) for n in numbers]
    nearest = [i for i, d in enumerate(distances) if d == min(distances)]
    codes = [int(torch.tensor(numbers[i]).to(E4M3).view(torch.uint8)) for i in nearest]
    return numbers[nearest[min(range(len(codes)), key=lambda j: codes[j] & 1)]]


def matrix(weight: torch.Tensor, device: str = "cpu") -> BlockMatrix:
    out = BlockMatrix.poisoned(weight.shape, torch.device(device))
    (quantise_blocks_reference if device == "cpu" else quantise_blocks_triton)(weight.to(device), out)
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


def test_quantised_values_are_the_formulas():
    """scale = the power of two from max(amax, 1e-10) / 448 on; numbers over it, to the nearest E4M3."""
    weight = torch.randn(130, 140) * torch.logspace(-6, 2, 140)
    weight[128:, 128:] = 0.0
    quantised = matrix(weight)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        block = weight[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
        scale = 2.0 ** math.ceil(math.log2(max(float(block.abs().max()), 1e-10) / 448))
        assert quantised.scales[i, j] == scale
        for row, column in ((0, 0), (1, 5), (-1, -1)):
            value = quantised.values[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128][
                : block.shape[0], : block.shape[1]
            ][row, column]
            assert float(value.float()) == scalar_e4m3(float(block[row, column] / scale))
    rows = quantise_rows_reference(weight)
    assert torch.equal(
        rows.scales_GM[:, :130].t(),
        torch.stack([scale_of(weight[:, s].abs().amax(1)) for s in (slice(0, 128), slice(128, None))], 1),
    )
    assert rows.values_MK.shape == (132, 256) and not rows.values_MK[:130, 140:].float().any(), (
        "depth is filled up with zeros"
    )


def test_e4m3_table_reads_every_number():
    every = torch.arange(256, dtype=torch.uint8).view(E4M3)
    assert torch.equal(from_e4m3(every), every.float()) or same_bits(
        from_e4m3(every).nan_to_num(9.0), every.float().nan_to_num(9.0)
    )


@pytest.mark.parametrize("shape", [(130, 140), (3, 40, 200)])
def test_weight_quantiser_kernel_is_bit_equal(device, shape):
    weight = torch.randn(*shape) * 3
    expected = BlockMatrix.poisoned(weight.shape, torch.device("cpu"))
    quantise_blocks_reference(weight, expected)
    actual = BlockMatrix.poisoned(weight.shape, torch.device(device))
    quantise_blocks_triton(weight.to(device), actual)
    assert same_bits(actual.values, expected.values) and same_bits(actual.scales, expected.scales)
    assert torch.equal(expected.wide, expected.dequantise())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_a_weight_is_quantising_without_loss(device, dtype):
    """What the numbers stand for is exact in bf16, and quantising it again gives it back."""
    weight = (torch.randn(200, 300) * torch.logspace(-6, 1, 300)).to(dtype)
    weight[130:, 256:] = 0.0
    for exponent in range(-3, 4):  # a largest number that rounds down to one with a smaller scale
        weight[0, 0] = 230.0 * 2.0**exponent
        rounded, kernel_rounded = weight.clone(), weight.clone().to(device)
        expected, actual, again = (
            BlockMatrix.poisoned(weight.shape, torch.device(d)) for d in ("cpu", device, "cpu")
        )
        quantise_blocks_reference(rounded, expected, round_weight=True)
        quantise_blocks_triton(kernel_rounded, actual, round_weight=True)
        assert torch.equal(rounded.float(), expected.dequantise()[:, :300]) and torch.equal(
            kernel_rounded.cpu(), rounded
        )
        quantise_blocks_reference(rounded, again)
        assert torch.equal(again.dequantise(), expected.dequantise())
        assert not torch.equal(rounded, weight)


MANY_SHAPES = [(130, 140), (256, 128), (3, 40, 200), (130, 140), (40, 200), (2, 5, 7)]


def assert_quantised(weights: list[torch.Tensor], outs: list[BlockMatrix]) -> None:
    for weight, out in zip(weights, outs, strict=True):
        expected = BlockMatrix.poisoned(weight.shape, torch.device("cpu"))
        quantise_blocks_reference(weight.cpu(), expected)
        assert same_bits(out.values, expected.values) and same_bits(out.scales, expected.scales), weight.shape


@pytest.mark.parametrize("dtype", first(1, [torch.float32, torch.bfloat16]))
def test_block_quantiser_of_many_weights_gives_the_same_bits(device, dtype):
    """Several of one shape, experts, and such as begin at no multiple of 16 bytes."""
    weights = [(torch.randn(*shape) * 3).to(device, dtype) for shape in MANY_SHAPES]
    weights.append(torch.randn(40 * 200 + 1).to(device, dtype)[1:].view(40, 200))
    outs = [BlockMatrix.poisoned(weight.shape, torch.device(device)) for weight in weights]
    BlockQuantiser().quantise_triton(list(map(WeightUpdate, weights, outs)))
    assert_quantised(weights, outs)


def test_block_quantiser_launches_once_a_shape_and_notices_moved_weights(device, monkeypatch):
    launches = []

    def counted(table):
        launches.append(table.shape)
        quantise_many_triton(table)

    monkeypatch.setattr(fp8_quantise_many, "quantise_many_triton", counted)
    weights = [torch.randn(*shape, device=device) for shape in MANY_SHAPES]
    outs = [BlockMatrix.poisoned(weight.shape, torch.device(device)) for weight in weights]
    quantiser = BlockQuantiser()
    quantiser.quantise_triton(list(map(WeightUpdate, weights, outs)))
    assert sorted(launches) == [(5, 7), (40, 200), (130, 140), (256, 128)]
    tables = quantiser._tables
    weights[4].mul_(2)  # in place
    quantiser.quantise_triton(list(map(WeightUpdate, weights, outs)))
    assert quantiser._tables is tables
    assert_quantised(weights, outs)
    for change in (torch.randn(40, 200, device=device), weights[4].bfloat16()):
        weights[4] = change
        quantiser.quantise_triton(list(map(WeightUpdate, weights, outs)))
        assert_quantised(weights, outs)


# Rows of each piece: blocks within pieces; one that ends a matrix early; one that has rows of two.
PIECES = [((256, 140), [128, 128]), ((300, 140), [256, 44]), ((300, 140), [300]), ((130, 140), [65, 65])]
EXPERT_PIECES = [((2, 256, 40), [128, 128] * 2), ((3, 140, 40), [128, 12] * 3), ((2, 130, 7), [65, 65] * 2)]


@pytest.mark.parametrize("dtype", first(1, [torch.float32, torch.bfloat16]))
def test_block_quantiser_copies_and_quantises_pieces(device, dtype):
    cases = PIECES + EXPERT_PIECES
    weights = [torch.full(shape, torch.nan, device=device, dtype=dtype) for shape, _ in cases]
    arriving = [
        [torch.randn(rows, shape[-1]).to(device, dtype) for rows in pieces] for shape, pieces in cases
    ]
    outs = [BlockMatrix.poisoned(weight.shape, torch.device(device)) for weight in weights]
    updates = list(map(WeightUpdate, weights, outs, arriving))
    assert [update.has_whole_blocks for update in updates] == [True, True, True, False, True, True, False]
    quantiser = BlockQuantiser()
    for _ in range(2):
        quantiser.quantise_triton(updates)
        for weight, pieces in zip(weights, arriving, strict=True):
            assert torch.equal(weight.flatten(0, -2), torch.cat(pieces))
        assert_quantised(weights, outs)
        for pieces in arriving:
            pieces[-1].mul_(3)  # the writer's next version, where it lay
    arriving[0][1] = arriving[0][1].clone() * 2  # and elsewhere
    quantiser.quantise_triton(updates)
    assert torch.equal(weights[0], torch.cat(arriving[0]))
    assert_quantised(weights, outs)


def test_block_quantiser_first_copies_pieces_of_another_type_or_not_contiguous(device):
    weight = torch.zeros(256, 40, device=device)
    out = BlockMatrix.poisoned(weight.shape, torch.device(device))
    for pieces in (
        [torch.randn(256, 40, device=device).bfloat16()],
        [torch.randn(128, 80, device=device)[:, ::2], torch.randn(128, 40, device=device)],
    ):
        update = WeightUpdate(weight, out, pieces)
        assert not update.has_whole_blocks
        BlockQuantiser().quantise_triton([update])
        assert torch.equal(weight, torch.cat([piece.float() for piece in pieces]))
        assert_quantised([weight], [out])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_weight_shows_in_its_blocks_scale(device, bad):
    weight = torch.randn(300, 200, device=device)
    weight[140, 150] = bad
    one, many = (BlockMatrix.poisoned(weight.shape, weight.device) for _ in range(2))
    quantise_blocks_triton(weight, one)
    BlockQuantiser().quantise_triton([WeightUpdate(weight, many)])
    for found in (one, many):
        assert found.scales.isfinite().tolist() == [[True, True], [True, False], [True, True]]


def test_activation_quantisers_are_bit_equal(device):
    """Alone, behind a norm and behind SwiGLU: the same bits as quantising what the plain kernel gives."""
    for dtype in [torch.float32] if device == "cpu" else [torch.float32, torch.bfloat16]:
        for width in (48, 300, 1280):
            x, residual, weight = (
                torch.randn(*s).to(dtype).to(device) * 2 for s in ((5, width), (5, width), (width,))
            )
            assert_rows_equal(quantise_rows_triton(x), quantise_rows_reference(x.cpu()))
            plain, total = rms_norm_triton(x, residual, weight, 1e-6)
            quantised, quantised_total = rms_norm_triton(x, residual, weight, 1e-6, quantise=True)
            assert_rows_equal(quantised, quantise_rows_reference(plain.cpu()))
            assert torch.equal(quantised_total, total)
            assert_rows_equal(
                silu_multiply_quantised_triton(x), quantise_rows_reference(silu_multiply_triton(x).cpu())
            )


def assert_rows_equal(actual: QuantisedRows, expected: QuantisedRows) -> None:
    rows = expected.num_rows
    assert same_bits(actual.values_MK[:rows], expected.values_MK[:rows])
    assert torch.equal(actual.scales_GM[:, :rows].cpu(), expected.scales_GM[:, :rows])
    assert actual.dtype == expected.dtype and actual.num_rows == rows


@pytest.mark.gpu
def test_quotients_of_two_bf16_numbers_are_all_bit_equal():
    """Groups whose largest number has each of the 128 mantissas, sixteen binades down.

    Beside it there are 125 other numbers and both zeros.
    """
    mantissa = 1 + torch.arange(128) / 128
    smaller_BM = mantissa.flip(0)[:127] * 2.0 ** -torch.arange(1, 17).unsqueeze(1)
    smaller_BM[:, :2] = torch.tensor([0.0, -0.0])
    x_MK = torch.cat((mantissa.repeat_interleave(16).unsqueeze(1), smaller_BM.repeat(128, 1)), dim=1).to(
        torch.bfloat16
    )
    expected, actual = quantise_rows_reference(x_MK), quantise_rows_triton(x_MK.cuda())
    assert same_bits(actual.values_MK, expected.values_MK) and same_bits(actual.scales_GM, expected.scales_GM)


def test_quotient_is_exact_after_two_corrections():
    """What `_quotient` does on a GPU, with its fused operations in float64.

    The products are exact there, and so is the first difference.
    """
    x, scale = torch.randn(1 << 20), torch.rand(1 << 20) + 0.001
    x[:2] = torch.tensor([0.0, -0.0])
    inverse, wide_scale = 1 / scale, scale.double()
    quotient = x * inverse
    wrong = [(quotient != x / scale).sum()]
    for _ in range(2):
        over = (quotient.double() * wide_scale - x.double()).float()
        quotient = (-over.double() * inverse.double() + quotient.double()).float()
        wrong.append((quotient != x / scale).sum())
    assert wrong[0] > 100_000 and wrong[2] == 0, wrong
    assert torch.equal(quotient.signbit(), x.signbit()), "zeros keep their sign"


def test_norm_adds_parts_in_order(device):
    parts, residual, weight = (torch.randn(*s, device=device) for s in ((3, 5, 300), (5, 300), (300,)))
    out, total = rms_norm_triton(parts, residual, weight, 1e-6)
    summed = ((parts[0] + parts[1]) + parts[2]) + residual
    assert torch.equal(total, summed)
    torch.testing.assert_close(
        out, rms_norm_residual.reference(summed.cpu(), torch.zeros(5, 300), weight.cpu(), 1e-6)[0].to(device)
    )


@pytest.mark.parametrize("width, depth", SHAPES)
def test_fp8_linear_reference_against_float64(width, depth):
    """The reference is the float64 product of what scales and values stand for; FP8 itself costs about 4%."""
    x, weight = torch.randn(37, depth), torch.randn(width, depth)
    rows, blocks = quantise_rows_reference(x), matrix(weight)
    exact = rows.dequantise().double() @ blocks.dequantise().double().t()
    out = fp8_linear_reference(rows, blocks)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)
    whole = x.double() @ weight.double().t()
    error = (exact - whole).norm() / whole.norm()
    assert 0.01 < error < 0.06, error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fp8_cpu_rows_are_invariant(dtype):
    x, blocks = torch.randn(128, 200).to(dtype), matrix(torch.randn(96, 200))
    whole = fp8_linear_reference(quantise_rows_reference(x), blocks)
    assert whole.dtype == dtype
    for num_rows in range(1, 129):
        first = (num_rows * 31) % (129 - num_rows)
        rows = slice(first, first + num_rows)
        assert torch.equal(fp8_linear_reference(quantise_rows_reference(x[rows]), blocks), whole[rows]), (
            num_rows
        )


@pytest.mark.parametrize(
    "num_rows, width, depth", first(2, [(5, 200, 320), (33, 96, 48), (1, 384, 256), (70, 128, 128)])
)
def test_fp8_linear_kernel(device, num_rows, width, depth):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x, weight = torch.randn(num_rows, depth).to(dtype), torch.randn(width, depth)
    expected = fp8_linear_reference(quantise_rows_reference(x), matrix(weight)).float()
    rows, blocks = quantise_rows_triton(x.to(device)), matrix(weight, device)
    tolerance = dict(rtol=1e-5, atol=1e-4) if device == "cpu" else dict(rtol=2e-2, atol=0.15)
    for tile in (Fp8Tile(32, 32, 4, 2), Fp8Tile(32, 64, 4, 2, tma=True)) if device == "cpu" else GPU_TILES:
        torch.testing.assert_close(fp8_linear_triton(rows, blocks, tile).float().cpu(), expected, **tolerance)
        torch.testing.assert_close(
            fp8_linear_triton(rows, blocks, tile, parts=2).sum(0).cpu(), expected, **tolerance
        )


def routed(x_ME: torch.Tensor, router_XE: torch.Tensor, choices: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights_MK, experts_MK = route_reference(
        linear_reference(x_ME.float(), router_XE.float()), choices, True, x_ME.dtype
    )
    return weights_MK, experts_MK.int()


@pytest.mark.parametrize("num_rows", [1, 20])
def test_fp8_expert_kernels(device, num_rows):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x, router = torch.randn(num_rows, 256).to(dtype), torch.randn(8, 256).to(dtype)
    gate_up, down = torch.randn(8, 256, 256) / 16, torch.randn(8, 256, 128) / 11
    expected = fp8_expert_feed_forward_reference(x, router, matrix(gate_up), matrix(down), 3, True)
    weights_MK, experts_MK = (t.to(device) for t in routed(x, router, 3))
    tile = Fp8Tile(16, 64, 4, 3) if device == "cpu" else choose_fp8_expert_tile(num_rows * 3, 8)
    out = fp8_experts_triton(
        quantise_rows_triton(x.to(device)),
        weights_MK,
        experts_MK,
        matrix(gate_up, device),
        matrix(down, device),
        tile,
    )
    difference = out.cpu().float() - expected.float()
    # One step of an intermediate number in E4M3, where another library's last bit rounds it the other way,
    # or the GPU's SwiGLU in bf16.
    one_step = 4e-2
    if device == "cpu":
        errors = difference.norm(dim=1) / expected.norm(dim=1)
        assert errors.median() < 1e-5 and errors.max() < 1e-5 + one_step, errors
    else:
        error = difference.norm() / expected.float().norm()
        assert error < 1e-2 + one_step / num_rows, error


def test_fp8_expert_reference_is_near_the_unquantised_one_and_row_invariant():
    x = torch.randn(40, 128)
    router = torch.randn(8, 128)
    gate_up = torch.randn(8, 128, 128) / 11
    down = torch.randn(8, 128, 64) / 8
    weights = router, matrix(gate_up), matrix(down), 2, True
    whole = fp8_expert_feed_forward_reference(x, *weights)
    exact = expert_feed_forward(x, router, gate_up, down, 2, True)
    assert 0.01 < (whole - exact).norm() / exact.norm() < 0.1
    for num_rows in (1, 2, 9, 33):
        rows = slice(3, 3 + num_rows)
        assert torch.equal(fp8_expert_feed_forward_reference(x[rows], *weights), whole[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("width, depth", [(1024, 4096), (512, 12288), (24576, 1024), (1000, 576)])
def test_fp8_gpu_rows_are_invariant(width, depth):
    """Every batch size through its own tile, every tile, and parts: the same float32 accumulators."""
    weight = torch.randn(width, depth, device="cuda").bfloat16()
    blocks, parts = matrix(weight, "cuda"), choose_parts(width, depth)
    x = torch.randn(700, depth, device="cuda") * torch.logspace(-3, 3, 700, device="cuda")[:, None]
    whole = fp8_linear_triton(quantise_rows_triton(x), blocks, parts=parts)
    for num_rows in (*range(1, 80), *range(80, 257, 7), 300, 511, 513):
        first = (num_rows * 31) % (701 - num_rows)
        rows = slice(first, first + num_rows)
        out = fp8_linear_triton(quantise_rows_triton(x[rows].contiguous()), blocks, parts=parts)
        assert torch.equal(out, whole[..., rows, :]), num_rows
    for tile in GPU_TILES:
        for num_rows in (1, 16, 64, 65, 128, 129, 256):
            assert torch.equal(
                fp8_linear_triton(quantise_rows_triton(x[:num_rows]), blocks, tile, parts),
                whole[..., :num_rows, :],
            ), tile


def test_fp8_tiles_in_use_are_all_compared():
    used = {
        choose_fp8_tile(num_rows, width) for num_rows in range(1, 1000) for width in (64, 4096, 6144, 24576)
    }
    assert used <= set(GPU_TILES) and all(128 % tile.cols == 0 for tile in used), (
        "a tile lies in one block of scales"
    )
