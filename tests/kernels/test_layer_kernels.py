"""RMSNorm, SwiGLU, RoPE with the cache write: kernels against references, those against Hugging Face."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from paceline.kernels.norm import rms_norm_reference, rms_norm_residual, rms_norm_triton
from paceline.kernels.rope_kv import rope_and_write_kv, rope_and_write_kv_triton, rope_reference
from paceline.kernels.swiglu import silu_multiply_reference, silu_multiply_triton
from tests.kernels.cases import first

TYPES = {"cpu": [torch.float32], "cuda": [torch.float32, torch.bfloat16]}


def assert_close(actual, expected):
    tolerance = 1e-2 if actual.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", first(2, [48, 128, 4096]))
def test_norm(device, width):
    for dtype in TYPES[device]:
        x, residual, weight = (torch.randn(*s).to(dtype) for s in ((5, width), (5, width), (width,)))
        moved = [t.to(device) for t in (x, residual, weight)]
        out, total = rms_norm_triton(*moved, 1e-6)
        expected, expected_total = rms_norm_residual.reference(x, residual, weight, 1e-6)
        assert torch.equal(total.cpu(), expected_total)
        assert_close(out, expected)
        assert_close(rms_norm_triton(moved[0], None, moved[2], 1e-6)[0], rms_norm_reference(x, weight, 1e-6))
        assert torch.equal(
            rms_norm_triton(moved[0][3:4], None, moved[2], 1e-6)[0],
            rms_norm_triton(moved[0], None, moved[2], 1e-6)[0][3:4],
        )


def test_swiglu(device):
    for dtype in TYPES[device]:
        gate_up = torch.randn(3, 2 * 1100).to(dtype)
        assert_close(silu_multiply_triton(gate_up.to(device)), silu_multiply_reference(gate_up))


def test_rope_is_hugging_faces():
    x, angle = torch.randn(7, 3, 32, dtype=torch.float64), torch.rand(7, 16, dtype=torch.float64)
    doubled = torch.cat([angle, angle], -1)[None]
    expected, _ = apply_rotary_pos_emb(
        x.transpose(0, 1)[None], x.transpose(0, 1)[None], doubled.cos(), doubled.sin()
    )
    torch.testing.assert_close(rope_reference(x, angle.cos(), angle.sin()), expected[0].transpose(0, 1))


@pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_dim", first(2, [(4, 2, 32), (9, 3, 64), (32, 8, 128)])
)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_rope_and_write_kv(device, num_heads, num_kv_heads, head_dim, qk_norm):
    slots = torch.tensor([3, 9, -1, 31, 4, 8, -5])
    positions, angle = torch.randint(0, 50, (7,)), torch.rand(50, head_dim // 2) * 6
    for dtype in TYPES[device]:
        qkv = torch.randn(7, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
        norms = [torch.randn(head_dim).to(dtype) if qk_norm else None for _ in range(2)]
        caches = [torch.zeros(4, 8, num_kv_heads, head_dim, dtype=dtype) for _ in range(2)]
        moved_caches = [c.to(device, copy=True) for c in caches]
        move = lambda *tensors: [t if t is None else t.to(device) for t in tensors]  # noqa: E731
        q = rope_and_write_kv_triton(
            *move(qkv, positions, slots, angle.cos(), angle.sin()), *moved_caches, num_heads, *move(*norms)
        )
        expected = rope_and_write_kv.reference(
            qkv, positions, slots, angle.cos(), angle.sin(), *caches, num_heads, *norms
        )
        assert_close(q, expected)
        for cache, moved in zip(caches, moved_caches, strict=True):
            assert_close(moved, cache)
        written = caches[1].flatten(0, 1).abs().sum((1, 2)) > 0
        assert written.nonzero().squeeze(1).tolist() == [3, 4, 8, 9, 31], "negative slots write nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layer_kernels_cpu_rows_are_invariant(dtype):
    x = torch.randn(128, 96, dtype=dtype)
    residual = torch.randn(128, 96, dtype=dtype)
    weight = torch.randn(96, dtype=dtype)
    angle = torch.rand(128, 16, dtype=dtype)
    whole = (
        rms_norm_residual.reference(x, residual, weight, 1e-6),
        silu_multiply_reference(x),
        rope_reference(x.view(128, 3, 32), angle, angle),
    )
    for num_rows in range(1, 129):
        r = slice((num_rows * 31) % (129 - num_rows), None)
        r = slice(r.start, r.start + num_rows)
        part = (
            rms_norm_residual.reference(x[r], residual[r], weight, 1e-6),
            silu_multiply_reference(x[r]),
            rope_reference(x[r].view(-1, 3, 32), angle[r], angle[r]),
        )
        assert (
            torch.equal(part[0][0], whole[0][0][r])
            and torch.equal(part[1], whole[1][r])
            and torch.equal(part[2], whole[2][r])
        )
