"""The product is right, and a row's bits do not depend on how many rows ran with it or on its place."""

import pytest
import torch

from paceline.kernels import linear as L
from paceline.kernels.linear import Tile, linear, linear_reference, linear_triton
from paceline.kernels.triton_support import INTERPRETED

SHAPES = [(128, 128), (128, 384), (512, 128), (128, 1024), (512, 512), (576, 192), (100, 130)]
TILES = [
    Tile(16, 32, 512, 4, 4),
    Tile(16, 64, 256, 4, 4),
    Tile(32, 32, 256, 4, 3),
    Tile(64, 32, 128, 4, 6),
    Tile(64, 64, 128, 4, 5),
    Tile(64, 64, 64, 4, 6),
    Tile(128, 32, 128, 4, 5),
    Tile(128, 64, 64, 4, 6),
    Tile(128, 64, 128, 4, 4),
    Tile(128, 128, 64, 4, 5),
    Tile(128, 128, 64, 8, 6),
    Tile(128, 256, 64, 8, 3),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("depth, width", SHAPES)
def test_linear_cpu_rows_are_invariant(depth, width, dtype):
    weight, x = torch.randn(width, depth, dtype=dtype), torch.randn(128, depth, dtype=dtype)
    whole = linear_reference(x, weight)
    torch.testing.assert_close(whole, x @ weight.t())
    for num_rows in range(1, 129):
        first = (num_rows * 31) % (129 - num_rows)
        rows = slice(first, first + num_rows)
        assert torch.equal(linear_reference(x[rows], weight), whole[rows]), f"{num_rows} rows from {first}"


def test_linear_cpu_row_does_not_see_its_neighbours():
    weight, x = torch.randn(96, 128), torch.randn(40, 128)
    other = torch.randn(40, 128) * 1e6
    other[17] = x[3]
    assert torch.equal(linear_reference(other, weight)[17], linear_reference(x, weight)[3])


def test_linear_cpu_logits_of_a_16_bit_policy_are_not_rounded_to_16_bits():
    weight, x = torch.randn(48, 128).bfloat16(), torch.randn(40, 128).bfloat16()
    logits = linear_reference(x, weight, torch.float32)
    assert logits.dtype == torch.float32 and (logits - x.double() @ weight.double().t()).abs().max() < 1e-4
    assert torch.equal(linear_reference(x[3:4], weight, torch.float32), logits[3:4])


@pytest.mark.parametrize("num_rows", [1, 5, 33, 70])
@pytest.mark.parametrize("depth, width", [(128, 96), (192, 50)])
def test_linear_kernels_interpreted(num_rows, depth, width):
    if not INTERPRETED:
        pytest.skip("kernels are compiled here, not interpreted")
    x, weight = torch.randn(num_rows, depth), torch.randn(width, depth)
    out = linear_triton(x, weight, tile=Tile(32, 32, 64, 4, 3))
    torch.testing.assert_close(out, linear_reference(x, weight), rtol=1e-5, atol=1e-4)


def bf16(*shape):
    return torch.randn(*shape, dtype=torch.float32, device="cuda").bfloat16()


@pytest.mark.gpu
@pytest.mark.parametrize("depth, width", [(4096, 6144), (4096, 4096), (12288, 4096), (576, 1000), (128, 384)])
def test_linear_kernels_on_a_gpu_are_right(depth, width):
    weight, x = bf16(width, depth), bf16(700, depth)
    exact = x.double() @ weight.double().t()
    for num_rows in (1, 16, 40, 64, 100, 256, 700):
        for deterministic in (False, True):
            out = linear(x[:num_rows], weight, deterministic=deterministic)
            assert (out - exact[:num_rows]).norm() / exact[:num_rows].norm() < 4e-3
            out = linear(x[:num_rows], weight, torch.float32, deterministic)
            assert (
                out.dtype == torch.float32
                and (out - exact[:num_rows]).norm() / exact[:num_rows].norm() < 5e-5
            )


@pytest.mark.gpu
@pytest.mark.parametrize("depth, width", [(4096, 1024), (12288, 512), (576, 1000), (128, 384)])
def test_linear_gpu_rows_are_invariant(depth, width):
    """Every batch size through its own tile, and every tile, in the float32 that the accumulator holds."""
    weight = bf16(width, depth)
    x = bf16(700, depth) * torch.logspace(-3, 3, 700, device="cuda")[:, None].bfloat16()
    whole = linear(x, weight, torch.float32, deterministic=True)
    for num_rows in (*range(1, 257), 300, 511, 513):
        first = (num_rows * 31) % (701 - num_rows)
        rows = slice(first, first + num_rows)
        assert torch.equal(linear(x[rows], weight, torch.float32, deterministic=True), whole[rows]), num_rows
    for tile in TILES:
        for num_rows in (1, 16, 64, 65, 128, 129, 256):
            out = linear_triton(x[:num_rows], weight, torch.float32, tile)
            assert torch.equal(out, whole[:num_rows]), (tile, num_rows)


def test_linear_tiles_in_use_are_all_compared():
    assert {
        L.choose_tile(m, width)
        for m in range(1, 5000)
        for width in (64, 4096, 4608, 5120, 6144, 24576, 151936)
    } <= set(TILES)
