"""Packed attention for learning: which kernel is fastest, right, and the same on every run.

    PYTHONPATH=src python benchmarks/learner_attention.py [--flex]

One micro-batch of `paceline bench learn` (16,384 tokens, longest 6,192) at Qwen3-4B's and 8B's heads (32
query, 8 key and value heads of 128). Errors are ||difference|| / ||float64|| of output and gradients on short
sequences; `repeats` says whether three backward passes gave the same bits.
"""

import argparse
import traceback

import torch
import torch.nn.functional as F

from paceline.bench.lengths import Lengths
from paceline.policy.attention import deterministic_flash

HEADS, KV_HEADS, DIM = 32, 8, 128


def flash(q, k, v, bounds, longest, lengths):
    return torch.ops.aten._flash_attention_forward(
        q, k, v, bounds, bounds, longest, longest, 0.0, True, False
    )[0]


def flash_repeated(q, k, v, bounds, longest, lengths):
    repeats = q.shape[1] // k.shape[1]
    return flash(
        q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1), bounds, longest, lengths
    )


class Cudnn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bounds, longest):
        out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, bounds, bounds, longest, longest, True, 0.0, True, False
        )
        ctx.save_for_backward(q, k, v, out, lse, seed, offset, bounds)
        ctx.longest = longest
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse, seed, offset, bounds = ctx.saved_tensors
        gradients = torch.ops.aten._cudnn_attention_backward(
            d_out.contiguous(),
            q,
            k,
            v,
            out,
            lse,
            seed,
            offset,
            q.new_empty(0),
            bounds,
            bounds,
            ctx.longest,
            ctx.longest,
            0.0,
            True,
        )
        return *gradients, None, None


def cudnn(q, k, v, bounds, longest, lengths):
    return Cudnn.apply(q, k, v, bounds, longest)


def cudnn_repeated(q, k, v, bounds, longest, lengths):
    repeats = q.shape[1] // k.shape[1]
    return Cudnn.apply(q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1), bounds, longest)


def per_sequence(q, k, v, bounds, longest, lengths):
    parts = [x.split(lengths) for x in (q, k, v)]
    outs = []
    for a, b, c in zip(*parts, strict=True):
        a, b, c = (x.transpose(0, 1)[None] for x in (a, b, c))
        outs.append(
            F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        )
    return torch.cat(outs)


def flex(q, k, v, bounds, longest, lengths):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    global _flex
    ids = torch.repeat_interleave(
        torch.arange(len(lengths), device=q.device), torch.tensor(lengths, device=q.device)
    )
    key = tuple(lengths)
    if key not in _masks:
        _masks[key] = create_block_mask(
            lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), None, None, len(ids), len(ids), device=q.device
        )
    _flex = _flex or torch.compile(flex_attention)
    a, b, c = (x.transpose(0, 1)[None] for x in (q, k, v))
    return _flex(a, b, c, block_mask=_masks[key], enable_gqa=True)[0].transpose(0, 1)


_flex, _masks = None, {}


def plain(q, k, v, lengths):
    """Float64, one sequence after the other."""
    outs = []
    for a, b, c in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        b, c = (x.repeat_interleave(a.shape[1] // b.shape[1], 1) for x in (b, c))
        scores = torch.einsum("ihd,jhd->hij", a, b) / a.shape[-1] ** 0.5
        mask = torch.ones(len(a), len(a), dtype=torch.bool, device=a.device).tril()
        outs.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(~mask, -torch.inf).softmax(-1), c))
    return torch.cat(outs)


def inputs(lengths, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    total = sum(lengths)
    made = [
        torch.randn(total, h, DIM, device="cuda", dtype=torch.bfloat16, generator=g)
        for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    bounds = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to("cuda", torch.int32)
    return *made, bounds


def gradients(run, q, k, v, d_out):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = run(*leaves)
    out.backward(d_out)
    return [out.detach(), *(x.grad for x in leaves)]


def error(run):
    lengths = [130, 1, 77, 300]
    q, k, v, d_out, bounds = inputs(lengths)
    ours = gradients(lambda a, b, c: run(a, b, c, bounds, 300, lengths), q, k, v, d_out)
    theirs = gradients(
        lambda a, b, c: plain(a, b, c, lengths), q.double(), k.double(), v.double(), d_out.double()
    )
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def milliseconds(work, repeats=7):
    work()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[repeats // 2]


def first_micro_batch():
    lengths = sorted((192 + n for n in Lengths.parse("lognormal:1196,1.0,16,6000", 64).values), reverse=True)
    part = []
    for length in lengths:
        if sum(part) + length > 16384:
            break
        part.append(length)
    return part


def measure(name, run, deterministic, lengths):
    q, k, v, d_out, bounds = inputs(lengths)
    longest = max(lengths)
    operations = 2 * HEADS * DIM * sum(n * n for n in lengths)
    with deterministic_flash(deterministic):
        wrong = error(run)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        forward = milliseconds(lambda: run(*leaves, bounds, longest, lengths))

        def both():
            for x in leaves:
                x.grad = None
            run(*leaves, bounds, longest, lengths).backward(d_out)

        whole = milliseconds(both)
        grads = []
        for _ in range(3):
            both()
            grads.append([x.grad.clone() for x in leaves])
    same = all(torch.equal(a, b) for g in grads[1:] for a, b in zip(g, grads[0], strict=True))
    print(
        f"{name:<24}{forward:>8.2f}{whole:>9.2f} ms {operations / forward / 1e9:>6.0f} "
        f"{2.5 * operations / (whole - forward) / 1e9:>6.0f} TFLOP/s  error {wrong:.4f}  "
        f"repeats {'yes' if same else 'no'}"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--flex", action="store_true", help="flex attention as well, which compiles")
    arguments = parser.parse_args()
    lengths = first_micro_batch()
    print(f"{len(lengths)} sequences, {sum(lengths)} tokens; forward, forward and backward; rates of each")
    cases = [
        ("flash, grouped", flash, False),
        ("flash, grouped, fixed", flash, True),
        ("flash, repeated", flash_repeated, False),
        ("cudnn, grouped", cudnn, False),
        ("cudnn, repeated", cudnn_repeated, False),
        ("sdpa per sequence", per_sequence, False),
    ]
    for name, run, deterministic in cases + ([("flex", flex, False)] if arguments.flex else []):
        try:
            measure(name, run, deterministic, lengths)
        except Exception:
            print(f"{name}: {traceback.format_exc().strip().splitlines()[-1][:300]}")


if __name__ == "__main__":
    main()
