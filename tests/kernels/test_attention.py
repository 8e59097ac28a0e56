"""Decode, verify and prefill attention are right, and a query's bits do not depend on how it was computed."""

import pytest
import torch

from paceline.kernels import paged_attention as decode
from paceline.kernels.paged_attention import (
    paged_attention,
    paged_attention_triton,
)
from paceline.kernels.paged_launch import Launch
from paceline.kernels.prefill_attention import (
    prefill_attention,
    prefill_attention_triton,
)
from tests.kernels.cases import first

HEADS = [(4, 2, 32), (3, 1, 64), (4, 4, 32), (14, 2, 64)]


def caches(num_kv_heads, head_dim, num_rows, max_tokens, block_size=16, dtype=torch.float32):
    blocks = num_rows * (max_tokens // block_size)
    k, v = (torch.randn(blocks + 3, block_size, num_kv_heads, head_dim, dtype=dtype) for _ in range(2))
    table = (torch.randperm(blocks) + 3).view(num_rows, -1).int()
    k[:3], v[:3] = torch.nan, torch.nan  # blocks of no row
    return k, v, table


def forget(k, v, table, lengths, block_size=16):
    """What lies past a row's length was never written."""
    for row, length in enumerate(lengths):
        slots = (table[row].long()[:, None] * block_size + torch.arange(block_size)).flatten()[length:]
        k.view(-1, *k.shape[2:])[slots] = torch.nan
        v.view(-1, *v.shape[2:])[slots] = torch.nan


def finite(*caches):
    """Kernels mask what they load; the reference needs a cache without NaN, as the CPU engine keeps it."""
    return [cache.nan_to_num(7.0) for cache in caches]


def brute_force(q_HD, k, v, table_B, position):
    group = q_HD.shape[0] // k.shape[2]
    k, v = (
        c[table_B.long()].flatten(0, 1)[: position + 1].double().repeat_interleave(group, 1) for c in (k, v)
    )
    weights = torch.softmax(torch.einsum("hd,lhd->hl", q_HD.double(), k) * q_HD.shape[1] ** -0.5, -1)
    return torch.einsum("hl,lhd->hd", weights, v)


@pytest.mark.parametrize("num_heads, num_kv_heads, head_dim", HEADS)
def test_attention_references_are_brute_force(num_heads, num_kv_heads, head_dim):
    k, v, table = caches(num_kv_heads, head_dim, 4, 320)
    context = torch.tensor([0, 130, -1, 300])
    forget(k, v, table, [5, 135, 0, 305])
    q = torch.randn(4, 5, num_heads, head_dim)
    out = paged_attention.reference(q, *finite(k, v), table, context)
    assert (out[2] == 0).all()
    for row in (0, 1, 3):
        for j in range(5):
            expected = brute_force(q[row, j], k, v, table[row], int(context[row]) + j)
            torch.testing.assert_close(out[row, j].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_heads, num_kv_heads, head_dim", first(2, HEADS))
@pytest.mark.parametrize("num_queries", [1, pytest.param(5, marks=pytest.mark.slow), 17])
@pytest.mark.parametrize("one_program", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_paged_kernel(device, num_heads, num_kv_heads, head_dim, num_queries, one_program, monkeypatch):
    if one_program:
        monkeypatch.setattr(decode, "multiprocessors", lambda _: 1)
    k, v, table = caches(num_kv_heads, head_dim, 4, 320)
    context = torch.tensor([0, 70, -1, 290])  # a tile, two, none, and a group and its next
    forget(k, v, table, [num_queries, 70 + num_queries, 0, 290 + num_queries])
    q = torch.randn(4, num_queries, num_heads, head_dim)
    out = paged_attention_triton(*(t.to(device) for t in (q, k, v, table, context)))
    torch.testing.assert_close(
        out.cpu(), paged_attention.reference(q, *finite(k, v), table, context), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_queries", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_paged_attention_launches_change_no_bit(device, num_queries, monkeypatch):
    """Rows of 0 to 10 groups, by one program and by several, with one to ten groups each.

    Ten groups are more than one batch of partial results.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    k, v, table = (t.to(device) for t in caches(1, 32, 4, 10 * decode.GROUP, dtype=dtype))
    q = torch.randn(4, num_queries, 2, 32, dtype=dtype, device=device)
    context = torch.tensor([9 * decode.GROUP, 3 * decode.GROUP - 2, -1, 5], device=device)
    whole = paged_attention_triton(q, k, v, table, context, launch=Launch(1, stages=3))
    for programs in (3, 10):
        for groups_each in (1, 4) if device == "cpu" else (1, 2, 4, 20):
            resident = -(-14 // groups_each)  # the rows have 14 groups together
            monkeypatch.setattr(decode, "multiprocessors", lambda device: resident)
            assert torch.equal(
                paged_attention_triton(
                    q, k, v, table, context, launch=Launch(programs, stages=3, resident=1)
                ),
                whole,
            )


@pytest.mark.parametrize("num_heads, num_kv_heads, head_dim", first(2, HEADS))
def test_prefill_kernel(device, num_heads, num_kv_heads, head_dim):
    k, v, table = caches(num_kv_heads, head_dim, 4, 320)
    cu_seqlens, context = torch.tensor([0, 7, 7, 50, 90]), torch.tensor([0, 5, 200, 150])
    forget(k, v, table, [7, 5, 243, 190])
    q = torch.randn(90, num_heads, head_dim)
    expected = prefill_attention.reference(q, *finite(k, v), table, cu_seqlens, context)
    out = prefill_attention_triton(*(t.to(device) for t in (q, k, v, table, cu_seqlens, context)))
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        expected[60].double(), brute_force(q[60], k, v, table[3], 160), rtol=1e-4, atol=1e-5
    )


def check_invariance(num_heads, num_kv_heads, head_dim, dtype, device, total=2 * decode.GROUP + 60):
    """One sequence in many ways; every query must come out with the same bits each time."""
    k, v, table = (t.to(device) for t in caches(num_kv_heads, head_dim, 6, 640, dtype=dtype))
    q = torch.randn(total, num_heads, head_dim, dtype=dtype).to(device)
    number = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    whole = prefill_attention(q, k, v, table[:1], number(0, total), number(0))
    for chunk in (1, 13, 128, 200):  # chunked prefill, packed with a stranger
        for start in range(0, total, chunk if chunk > 1 else 37):
            end = min(total, start + chunk)
            packed = torch.cat([torch.randn_like(q[:9]), q[start:end]])
            out = prefill_attention(
                packed, k, v, table[[4, 0]], number(0, 9, 9 + end - start), number(50, start)
            )
            assert torch.equal(out[9:], whole[start:end]), f"prefill chunk {chunk} at {start}"
    for num_queries in (
        1,
        2,
        3,
        4,
        5,
        8,
        16,
    ):  # decoding and verification, alone and in a batch, narrow and wide tables
        for position in (0, 1, 63, 100, 127, 250, 256, 300, 511, total - 16):
            mine = q[position : position + num_queries]
            alone = paged_attention(mine[None], k, v, table[:1], number(position))
            assert torch.equal(alone[0], whole[position : position + num_queries]), (
                f"Q = {num_queries} at {position}"
            )
            strangers = torch.randn(5, num_queries, num_heads, head_dim, dtype=dtype).to(device)
            batch = torch.cat([strangers, mine[None]])
            out = paged_attention(
                batch, k, v, table[[1, 2, 3, 4, 5, 0]], number(20, 600, -1, 7, 150, position)
            )
            assert torch.equal(out[5], alone[0]), f"batch of 6, Q = {num_queries} at {position}"
            many = batch.repeat(30, 1, 1, 1)
            out = paged_attention(
                many,
                k,
                v,
                table[[1, 2, 3, 4, 5, 0]].repeat(30, 1),
                number(*[20, 600, -1, 7, 150, position] * 30),
            )
            assert torch.equal(out[179], alone[0]), f"batch of 180, Q = {num_queries} at {position}"
            if num_queries > 1 and device == "cpu":
                break  # the batch of 180 is slow here


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_heads, num_kv_heads, head_dim", [(4, 2, 32), (4, 4, 32), (3, 1, 16)])
def test_attention_cpu_bits_are_invariant(num_heads, num_kv_heads, head_dim, dtype):
    check_invariance(num_heads, num_kv_heads, head_dim, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_dim", [(32, 8, 128), (9, 3, 64), (28, 4, 128), (16, 16, 64), (4, 2, 32)]
)
def test_attention_gpu_bits_are_invariant(num_heads, num_kv_heads, head_dim):
    check_invariance(num_heads, num_kv_heads, head_dim, torch.bfloat16, "cuda")


@pytest.mark.gpu
def test_attention_over_a_long_context_in_bfloat16_on_a_gpu():
    k, v, table = caches(8, 128, 3, 8192, dtype=torch.bfloat16)
    q, context = torch.randn(3, 4, 32, 128, dtype=torch.bfloat16), torch.tensor([8000, 5, 3333])
    out = paged_attention(*(t.cuda() for t in (q, k, v, table, context))).cpu()
    for row in range(3):
        expected = brute_force(q[row, 2], k, v, table[row], int(context[row]) + 2)
        assert (out[row, 2].double() - expected).norm() / expected.norm() < 1e-2
