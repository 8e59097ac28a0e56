"""The CPU uses only shapes that keep a row's bits, also where a library's products depend on their shape."""

import pytest
import torch
import torch.nn.functional as F

from paceline.kernels import attention_shapes as shapes
from paceline.kernels import row_tiles
from paceline.kernels.attention_shapes import Heads, attention_shapes
from paceline.kernels.paged_attention import paged_attention

RIGHT_LINEAR, RIGHT_FLASH = F.linear, shapes.flash


@pytest.fixture
def fresh_trials():
    """Trials are made anew within and after the test."""
    row_tiles.tile_sizes.cache_clear()
    attention_shapes.cache_clear()
    yield
    row_tiles.tile_sizes.cache_clear()
    attention_shapes.cache_clear()


def test_cut_rows_gives_full_tiles_and_one_for_the_rest():
    assert row_tiles.cut_rows(300, (2, 16, 128)) == [128, 128, 128]
    assert row_tiles.cut_rows(258, (2, 16, 128)) == [128, 128, 2]
    assert row_tiles.cut_rows(3, (2, 16)) == [16]
    assert row_tiles.cut_rows(32, (16,)) == [16, 16]


def test_multiply_rows_without_rows():
    assert row_tiles.multiply_rows(torch.zeros(0, 8), torch.randn(5, 8)).shape == (0, 5)


@pytest.mark.parametrize("deviant", [{1, 2, 8, 128}, set(range(1, 200)) - {row_tiles.ROW_TILE}])
def test_tile_sizes_leave_out_sizes_that_round_differently(deviant, fresh_trials, monkeypatch):
    """A library that sums in another order for some numbers of rows."""

    def linear(x, weight):
        out = RIGHT_LINEAR(x, weight)
        return out * (1 + 2e-7) if len(x) in deviant else out

    monkeypatch.setattr(row_tiles.F, "linear", linear)
    weight, x = torch.randn(40, 64), torch.randn(150, 64)
    whole = row_tiles.multiply_rows(x, weight)
    sizes = row_tiles.tile_sizes(40, 64, torch.float32, torch.get_num_threads(), row_tiles.mkldnn_enabled())
    assert row_tiles.ROW_TILE in sizes and not deviant & set(sizes)
    for num_rows in (1, 2, 3, 8, 17, 100, 150):
        assert torch.equal(row_tiles.multiply_rows(x[:num_rows], weight), whole[:num_rows])


def test_tile_sizes_tries_few_sizes_or_none_for_large_weights():
    limits = sorted(row_tiles.TRIED_SIZES)
    assert list(row_tiles.TRIED_SIZES) == limits
    assert row_tiles.tile_sizes(limits[-1] + 1, 1, torch.float32, 1, False) == (row_tiles.ROW_TILE,)


@pytest.mark.parametrize("wrong_rows, wrong_keys", [({4}, set()), (set(range(1, 33)) - {16}, {192, 320})])
def test_attention_shapes_leave_out_those_that_round_differently(
    wrong_rows, wrong_keys, fresh_trials, monkeypatch
):
    """Tiles of some sizes, and some numbers of keys, come out with other bits."""

    def flash(q, k, v, mask):
        out, lse = RIGHT_FLASH(q, k, v, mask)
        odd = q.shape[2] in wrong_rows or k.shape[2] in wrong_keys
        return (out * (1 + 2e-7) if odd else out), lse

    for module in ("attention_shapes", "attention_reference"):
        monkeypatch.setattr(f"paceline.kernels.{module}.flash", flash)
    found = attention_shapes(Heads.of(4, 2, 32, torch.float32), 16, torch.get_num_threads(), _mkldnn())
    assert not {2 * queries for queries in found.tile_queries} & wrong_rows
    assert all(found.chunk_keys < keys for keys in wrong_keys)
    check_queries(torch.float32)


def _mkldnn():
    return row_tiles.mkldnn_enabled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_over_long_contexts_is_folded(dtype):
    check_queries(dtype, context=1100)


def check_queries(dtype, context=400):
    """Five queries at once, one at a time, and beside rows of other lengths."""
    k, v = torch.randn(2, 160, 16, 2, 32, dtype=dtype)
    table = torch.randperm(160)[:152].view(2, 76).int()
    q = torch.randn(2, 5, 4, 32, dtype=dtype)
    start = torch.tensor([context, 30])
    whole = paged_attention.reference(q, k, v, table, start)
    for j in range(5):
        alone = paged_attention.reference(q[:1, j : j + 1], k, v, table[:1], start[:1] + j)
        assert torch.equal(alone[0, 0], whole[0, j])
        position = context + j
        keys, values = (x[table[0].long()].flatten(0, 1)[: position + 1].double() for x in (k, v))
        scores = torch.einsum("hgd,lhd->hgl", q[0, j].double().view(2, 2, 32), keys) * 32**-0.5
        right = torch.einsum("hgl,lhd->hgd", scores.softmax(-1), values).flatten(0, 1)
        torch.testing.assert_close(whole[0, j].double(), right, rtol=1e-4, atol=1e-5)
    assert torch.equal(paged_attention.reference(q[1:], k, v, table[1:], start[1:])[0], whole[1])
