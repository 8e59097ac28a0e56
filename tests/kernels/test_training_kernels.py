"""The learner's kernels, interpreted, against their references, and these against autograd in float64."""

import pytest
import torch

from paceline.kernels.adamw import AdamWStep, adamw, adamw_triton
from paceline.kernels.adamw_8bit import EightBit, _store_reference, adamw_8bit, adamw_8bit_triton
from paceline.kernels.draft_diagonal import (
    join_diagonal,
    join_diagonal_backward,
    join_diagonal_backward_triton,
    join_diagonal_triton,
)
from paceline.kernels.logprob_rows import logprob_rows, logprob_rows_triton
from paceline.kernels.norm import rms_norm_reference
from paceline.kernels.norm_training import rms_norm_backward, rms_norm_backward_triton
from paceline.kernels.rope_training import (
    heads_together,
    rotate_qk,
    rotate_qk_backward,
    rotate_qk_backward_triton,
    rotate_qk_triton,
)
from paceline.kernels.swiglu import silu_multiply_reference
from paceline.kernels.swiglu_training import silu_multiply_backward_reference, silu_multiply_backward_triton

EPSILON = 1e-6


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def assert_equal(ours, theirs, limit=2e-6):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=limit, atol=limit)


def test_norm_backward():
    d_normed, d_total, total, weight = (
        torch.randn(5, 40),
        torch.randn(5, 40),
        torch.randn(5, 40),
        torch.randn(40),
    )
    for also in (d_total, None):
        arguments = (d_normed, also, total, weight, EPSILON)
        assert_equal(rms_norm_backward_triton(*arguments), rms_norm_backward.reference(*arguments))
    assert rms_norm_backward_triton(d_normed, None, total, weight, EPSILON, needs_weight=False)[1] is None
    x, w = total.double().requires_grad_(), weight.double().requires_grad_()
    expected = torch.autograd.grad(rms_norm_reference(x, w, EPSILON), (x, w), d_normed.double())
    found = rms_norm_backward.reference(d_normed.double(), None, total.double(), weight.double(), EPSILON)
    assert_equal(found, expected, 1e-12)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 12), (3, 1, 16)])
def test_rotation(heads, kv_heads, dim, norm):
    qkv, rope = torch.randn(4, (heads + 2 * kv_heads) * dim), torch.randn(4, 2, dim // 2)
    norms = (torch.randn(dim), torch.randn(dim)) if norm else (None, None)
    forward = (qkv, rope, heads, kv_heads, *norms, EPSILON)
    assert_equal(rotate_qk_triton(*forward), rotate_qk.reference(*forward))
    gradients = tuple(torch.randn(4, n, dim) for n in (heads, kv_heads, kv_heads))
    backward = (*gradients, qkv, rope, *norms, EPSILON)
    assert_equal(rotate_qk_backward_triton(*backward), rotate_qk_backward.reference(*backward))

    leaf = qkv.double().requires_grad_()
    weights = tuple(None if w is None else w.double().requires_grad_() for w in norms)
    q, k = rotate_qk.reference(leaf, rope.double(), heads, kv_heads, *weights, EPSILON)
    v = leaf.unflatten(1, (-1, dim))[:, heads + kv_heads :]
    outer = [g.double() for g in gradients]
    expected = torch.autograd.grad((q, k, v), [leaf, *(w for w in weights if w is not None)], outer)
    detached = [None if w is None else w.detach() for w in weights]
    found = rotate_qk_backward.reference(*outer, leaf.detach(), rope.double(), *detached, EPSILON)
    assert_equal([g for g in found if g is not None], expected, 1e-10)


@pytest.mark.parametrize("heads, kv_heads, together", [(32, 8, 8), (28, 4, 4), (9, 3, 1), (6, 2, 2)])
def test_rotation_programs_take_heads_of_one_kind(heads, kv_heads, together):
    assert heads_together(heads, kv_heads) == together


def test_swiglu_backward():
    d, gate_up = torch.randn(3, 1100), torch.randn(3, 2200)
    reference = silu_multiply_backward_reference(d, gate_up)
    assert_equal([silu_multiply_backward_triton(d, gate_up)], [reference])
    assert_equal([silu_multiply_backward_triton(d, gate_up.clone(), in_place=True)], [reference])
    x = gate_up.double().requires_grad_()
    expected = torch.autograd.grad(silu_multiply_reference(x), x, d.double())
    assert_equal([silu_multiply_backward_reference(d.double(), gate_up.double())], expected, 1e-12)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("heads, kv_heads, dim", [(6, 2, 12), (4, 4, 16)])
def test_join_diagonal(steps, heads, kv_heads, dim):
    """Some rows have no prefix; earlier steps' rows are seen in a circle, more steps than rows included."""
    rows = 2 if steps == 3 and heads == kv_heads else 7
    prefix, q, d, d_q = torch.randn(4, rows, heads, dim)
    lse = torch.randn(rows, heads)
    lse[:2], prefix[:2] = -torch.inf, 0.0
    own_k, own_v, d_k, d_v = torch.randn(4, steps, rows, kv_heads, dim)
    forward = (prefix, lse, q, own_k, own_v)
    out, total = join_diagonal_triton(*forward)
    assert_equal((out, total), join_diagonal.reference(*forward))
    results = []
    for run in (join_diagonal_backward_triton, join_diagonal_backward.reference):
        results.append([x.clone() for x in (d_q, d_k, d_v)])
        run(d, q, own_k, own_v, out, total, *results[-1])
    assert_equal(*results, 1e-5)


@pytest.mark.parametrize("width", [50, 5000])
def test_logprob_rows(width):
    """Scores of very different sizes, in rows shorter and longer than a block."""
    logits = torch.randn(4, width) * torch.tensor([0.1, 5.0, 40.0, 1.0])[:, None] + 100
    targets, temperatures = torch.randint(0, width, (4,)), torch.tensor([1.0, 0.6, 1.0, 2.0])
    ours, theirs = torch.empty(4, width), torch.empty(4, width)
    found = logprob_rows_triton(logits, targets, temperatures, ours)
    assert_equal(found, logprob_rows.reference(logits, targets, temperatures, theirs), 1e-4)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    x = logits.double().requires_grad_()
    logprobs, _ = logprob_rows.reference(x, targets, temperatures.double())
    (gradient,) = torch.autograd.grad(logprobs.sum(), x)
    torch.testing.assert_close(
        -theirs.double() / temperatures[:, None].double(), gradient, rtol=1e-4, atol=1e-6
    )
    assert all(x.isnan().any() for x in logprob_rows_triton(logits * torch.nan, targets, temperatures))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_gradient", [True, False], ids=["gradient", "none"])
def test_adamw(dtype, has_gradient):
    master = torch.randn(30, 100)
    state = [master, torch.randn(30, 100), torch.rand(30, 100)]
    gradient = torch.randn(30, 100).to(dtype) if has_gradient else None
    step = AdamWStep(number=3, learning_rate=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1)
    results = []
    for run in (adamw_triton, adamw.reference):
        own = [tensor.clone() for tensor in state]
        parameter = own[0] if dtype == torch.float32 else own[0].to(dtype)
        run(parameter, *own, gradient, torch.tensor(0.7), step)
        results.append(own)
        # The interpreter cuts where a GPU rounds.
        torch.testing.assert_close(parameter.float(), own[0], rtol=2**-7, atol=1e-6)
    assert_equal(*results)


@pytest.mark.parametrize("has_gradient", [True, False], ids=["gradient", "none"])
def test_adamw_with_moments_of_eight_bits(has_gradient):
    """Both round at random in the same way: after some steps the same numbers are kept."""
    results = []
    for run in (adamw_8bit_triton, adamw_8bit.reference):
        torch.manual_seed(1)
        master = torch.randn(7, 100)
        first, second = (EightBit.zeros(700, master.device) for _ in range(2))
        for number in range(1, 4):
            gradient = torch.randn(7, 100) * torch.logspace(-6, 0, 7)[:, None] if has_gradient else None
            step = AdamWStep(number, learning_rate=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1)
            run(master, master, first, second, gradient, torch.tensor(0.7), step)
        results.append((master, first.wide(), second.wide()))
    (ours, *our_moments), (theirs, *their_moments) = results
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    for a, b in zip(our_moments, their_moments, strict=True):
        # Where a quotient is rounded differently, one may go up and the other down.
        assert ((a - b).abs() > 1e-6 * b.abs().max()).float().mean() < 0.01


def test_adamw_8bit_rounding_keeps_the_mean_and_never_makes_a_root_zero():
    x = torch.full((1 << 12,), 1.05)
    x[::128] = 400.0  # makes every other number of its group small
    kept = torch.zeros(1 << 12)
    for number in range(200):
        out = EightBit.zeros(1 << 12, x.device)
        _store_reference(out, x.view(-1, 128), number, 0)
        kept += out.wide().flatten() / 200
    assert float(kept[1:128].mean()) == pytest.approx(1.05, rel=0.01)
    out = EightBit.zeros(128, x.device)
    _store_reference(out, torch.cat((torch.tensor([1.0]), torch.full((127,), 1e-12))).view(1, 128), 1, 1)
    assert (out.wide() > 0).all()
