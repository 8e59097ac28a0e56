"""An E4M3 KV cache: what is written, what attention reads, and that sequences do not affect each other."""

import pytest
import torch

from paceline.kernels.attention_reference import attend_reference
from paceline.kernels.attention_shapes import Heads
from paceline.kernels.fp8_format import E4M3, from_e4m3, to_e4m3
from paceline.kernels.fp8_quantise import quantise_rows_reference
from paceline.kernels.paged_attention import paged_attention, paged_attention_triton
from paceline.kernels.paged_launch import Launch
from paceline.kernels.prefill_attention import prefill_attention, prefill_attention_triton
from paceline.kernels.query_tiles import make_tiles
from paceline.kernels.rope_kv import rope_and_write_kv, rope_and_write_kv_triton

BLOCK_SIZE = 16
KV_HEADS = 2
HEADS = 4
DIM = 32


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().view(torch.uint8)


def cache(num_blocks: int, dim: int = DIM) -> tuple[torch.Tensor, ...]:
    k, v = (torch.randn(num_blocks, BLOCK_SIZE, KV_HEADS, dim) for _ in range(2))
    k_scale, v_scale = torch.rand(KV_HEADS) / 50 + 0.005, torch.rand(KV_HEADS) / 50 + 0.005
    return to_e4m3(k / k_scale[:, None]), to_e4m3(v / v_scale[:, None]), k_scale, v_scale


@pytest.mark.parametrize("qk_norm", [False, True])
def test_fp8_kv_write_is_the_quantised_number(device, qk_norm):
    """The reference is the plain one, rounded; the kernel is the reference, to the bit if not rotated."""
    slots, positions = torch.tensor([3, 9, -1, 31, 4]), torch.tensor([0, 5, 7, 2, 1])
    k_scale, v_scale = torch.tensor([0.003, 0.004]), torch.tensor([0.005, 0.03])
    norms = [torch.randn(DIM) if qk_norm else None for _ in range(2)]
    qkv = torch.randn(5, (HEADS + 2 * KV_HEADS) * DIM)
    for angle in (torch.zeros(8, DIM // 2), torch.rand(8, DIM // 2) * 6):
        wide = [torch.zeros(4, 8, KV_HEADS, DIM) for _ in range(2)]
        q_wide = rope_and_write_kv.reference(
            qkv, positions, slots, angle.cos(), angle.sin(), *wide, HEADS, *norms
        )
        narrow = [torch.zeros(4, 8, KV_HEADS, DIM, dtype=E4M3) for _ in range(2)]
        q = rope_and_write_kv.reference(
            qkv, positions, slots, angle.cos(), angle.sin(), *narrow, HEADS, *norms, 1e-6, k_scale, v_scale
        )
        assert torch.equal(q, q_wide)
        for plain, stored, scale in zip(wide, narrow, (k_scale, v_scale), strict=True):
            assert torch.equal(bytes_of(stored), bytes_of(to_e4m3(plain / scale[:, None])))
        assert (from_e4m3(narrow[0]).abs() == 448).any() and not from_e4m3(narrow[0]).isnan().any(), (
            "beyond the scale it saturates"
        )
        moved = [torch.zeros(4, 8, KV_HEADS, DIM, dtype=E4M3, device=device) for _ in range(2)]
        move = lambda *tensors: [t if t is None else t.to(device) for t in tensors]  # noqa: E731
        rope_and_write_kv_triton(
            *move(qkv, positions, slots, angle.cos(), angle.sin()),
            *moved,
            HEADS,
            *move(*norms),
            1e-6,
            *move(k_scale, v_scale),
        )
        assert torch.equal(bytes_of(moved[1]), bytes_of(narrow[1]))
        close = (from_e4m3(moved[0].cpu()) - from_e4m3(narrow[0])).abs() <= 0.0626 * from_e4m3(
            narrow[0]
        ).abs() + 2**-9
        assert close.all() and (bytes_of(moved[0]) == bytes_of(narrow[0])).float().mean() > 0.99


def test_rope_adds_parts_in_order(device):
    parts = torch.randn(2, 5, (HEADS + 2 * KV_HEADS) * DIM, device=device)
    slots = torch.tensor([3, 9, -1, 31, 4])
    positions = torch.tensor([0, 5, 7, 2, 1])
    angle = torch.rand(8, DIM // 2) * 6
    tables = [t.to(device) for t in (positions, slots, angle.cos(), angle.sin())]
    dtype, results = torch.float32 if device == "cpu" else torch.bfloat16, []
    for qkv in (parts, (parts[0] + parts[1]).to(dtype)):
        caches = [torch.zeros(4, 8, KV_HEADS, DIM, dtype=dtype, device=device) for _ in range(2)]
        results.append([rope_and_write_kv_triton(qkv, *tables, *caches, HEADS, dtype=dtype), *caches])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and results[0][0].dtype == dtype


def test_rope_queries_have_the_type_asked_for(device):
    """A projection in parts is float32; queries of that type would take attention off the tensor cores."""
    qkv = torch.randn(5, (HEADS + 2 * KV_HEADS) * DIM)
    slots = torch.tensor([3, 9, -1, 31, 4])
    positions = torch.tensor([0, 5, 7, 2, 1])
    angle = torch.rand(8, DIM // 2) * 6
    caches = [torch.zeros(4, 8, KV_HEADS, DIM, dtype=torch.bfloat16, device=device) for _ in range(2)]
    inputs = [x.to(device) for x in (qkv, positions, slots, angle.cos(), angle.sin())]
    assert rope_and_write_kv(*inputs, *caches, HEADS, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("queries", [1, 3])
def test_decode_attention(device, queries):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    k, v, k_scale, v_scale = cache(12)
    q = torch.randn(3, queries, HEADS, DIM).to(dtype)
    table, context = torch.randperm(11)[:9].view(3, 3).int() + 1, torch.tensor([40, -1, 7])
    expected = paged_attention.reference(q, k, v, table, context, k_scale, v_scale)
    wide = paged_attention.reference(
        q.float(), from_e4m3(k) * k_scale[:, None], from_e4m3(v) * v_scale[:, None], table, context
    )
    torch.testing.assert_close(expected.float(), wide, rtol=1e-2, atol=1e-4 if device == "cpu" else 1e-2)
    for programs in (1, 2):
        moved = (t.to(device) for t in (q, k, v, table, context))
        out = paged_attention_triton(
            *moved, k_scale.to(device), v_scale.to(device), launch=Launch(programs, 2)
        )
        torch.testing.assert_close(
            out.cpu().float(), expected.float(), rtol=1e-2, atol=1e-5 if device == "cpu" else 1e-2
        )


@pytest.mark.parametrize("programs", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("fp8_cache", [True, False])
def test_decode_attention_quantises_its_heads(device, programs, fp8_cache):
    """What a product takes: the plain result, rounded as it would be stored, then quantised head by head."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    k, v, k_scale, v_scale = (t.to(device) for t in cache(12, 128))
    scales = dict(k_scale_H=k_scale, v_scale_H=v_scale) if fp8_cache else {}
    if not fp8_cache:
        k, v = k.to(dtype), v.to(dtype)
    q = torch.randn(3, 2, HEADS, 128).to(device, dtype)
    table = (torch.randperm(11)[:9].view(3, 3).int() + 1).to(device)
    context = torch.tensor([40, -1, 7], device=device)
    plain = paged_attention_triton(q, k, v, table, context, launch=Launch(programs, 2), **scales)
    quantised = paged_attention_triton(
        q, k, v, table, context, launch=Launch(programs, 2), **scales, quantise=True
    )
    expected = quantise_rows_reference(plain.flatten(0, 1).flatten(1).cpu())
    assert quantised.num_rows == 6
    assert torch.equal(quantised.dequantise().cpu(), expected.dequantise())


def test_prefill_attention(device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    k, v, k_scale, v_scale = cache(12)
    q, table = torch.randn(25, HEADS, DIM).to(dtype), torch.arange(1, 7).view(2, 3).int()
    boundaries, context = torch.tensor([0, 20, 25]), torch.tensor([0, 30])
    expected = prefill_attention.reference(q, k, v, table, boundaries, context, k_scale, v_scale)
    moved = (t.to(device) for t in (q, k, v, table, boundaries, context))
    out = prefill_attention_triton(
        *moved, rows=32, warps=4, stages=2, k_scale_H=k_scale.to(device), v_scale_H=v_scale.to(device)
    )
    torch.testing.assert_close(
        out.cpu().float(), expected.float(), rtol=1e-2, atol=1e-5 if device == "cpu" else 1e-2
    )


def test_e4m3_pairs_hold_every_number():
    """What kernels make of a pair of E4M3 numbers: float16 bits of each, times 2^-8, exactly."""
    every = torch.arange(256, dtype=torch.uint8)
    every = every[~every.view(E4M3).float().isnan()]
    pairs = torch.cartesian_prod(every, every).contiguous().view(torch.int16).flatten()
    even = (((pairs & 0x80) << 8) | ((pairs & 0x7F) << 7)).view(torch.float16)
    odd = ((pairs & -0x8000) | ((pairs & 0x7F00) >> 1)).view(torch.float16)
    expected = torch.cartesian_prod(every, every).view(E4M3).float()
    assert torch.equal(torch.stack((even, odd), 1).float() * 256, expected)


def test_fp8_kv_cpu_queries_are_invariant():
    k, v, k_scale, v_scale = cache(12)
    q, position = torch.randn(40, HEADS, DIM), torch.randint(0, 47, (40,))
    table = torch.stack([torch.randperm(11)[:3] + 1 for _ in range(40)]).int()

    def attended(part):
        heads = Heads.of(HEADS, KV_HEADS, DIM, q.dtype)
        tiles = make_tiles(heads, 16, torch.ones_like(position[part]), position[part], table[part])
        return attend_reference(q[part], tiles, k, v, k_scale, v_scale)

    whole = attended(slice(None))
    for count in range(1, 41):
        part = slice((count * 7) % (41 - count), None)
        part = slice(part.start, part.start + count)
        assert torch.equal(attended(part), whole[part])


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("queries", [1, 4])  # 8 and 16 rows of the tensor core
def test_fp8_kv_gpu_bits_do_not_depend_on_the_batch_or_on_prefill(dim, queries):
    heads, rows = 8, 24
    tensors = [t.cuda() for t in cache(rows * 40 + 1, dim)]
    (k, v), scales = tensors[:2], dict(k_scale_H=tensors[2], v_scale_H=tensors[3])
    table = (torch.randperm(rows * 40) + 1).view(rows, 40).int().cuda()
    context = torch.randint(1, 630, (rows,)).cuda()
    q = torch.randn(rows, queries, heads, dim).bfloat16().cuda()
    whole = paged_attention_triton(q, k, v, table, context, launch=Launch(1, 3), **scales)
    for programs in (2, 3):
        assert torch.equal(
            paged_attention_triton(q, k, v, table, context, launch=Launch(programs, 3), **scales), whole
        )
    for row in range(rows):
        one = slice(row, row + 1)
        assert torch.equal(
            paged_attention_triton(q[one], k, v, table[one], context[one], **scales), whole[one]
        )
    boundaries = torch.arange(0, queries * rows + 1, queries).cuda()
    assert torch.equal(
        prefill_attention_triton(q.flatten(0, 1), k, v, table, boundaries, context, **scales).view(
            whole.shape
        ),
        whole,
    )
