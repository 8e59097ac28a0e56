"""FP8 on the GPU: every kernel against its reference, then tiles for each weight shape of Qwen3-8B behind a
small dependent kernel.

PYTHONPATH=src:bench python3 bench/gpu_probe_fp8.py [check] [tiles] [attention] [sync]
"""

# ruff: noqa: B023  (closures run at once)

import itertools
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from gpu_probe_step import DIM, HEADS, KV_HEADS, graph_of, time_graph, weight

from paceline.kernels import norm
from paceline.kernels.fp8_format import BlockMatrix, to_e4m3
from paceline.kernels.fp8_linear import Fp8Tile, fp8_linear_cublas, fp8_linear_reference, fp8_linear_triton
from paceline.kernels.fp8_quantise import quantise_blocks, quantise_rows
from paceline.kernels.linear import linear
from paceline.kernels.paged_attention import paged_attention

started = time.time()
OPS = {"qkv": (6144, 4096, 14), "o": (4096, 4096, 20), "gate_up": (24576, 4096, 5), "down": (4096, 12288, 8)}
LAYERS = 36
T = Fp8Tile
TILES = {
    1: [T(16, 64, 4, s, tma) for s, tma in itertools.product((4, 6, 8, 10), (False, True))]
    + [T(16, 128, 4, 4), T(16, 128, 4, 6, True)],
    32: [T(32, 64, 4, s, tma) for s, tma in itertools.product((4, 6, 8), (False, True))]
    + [T(32, 128, 4, 5, True)],
    64: [T(64, 64, 4, s, tma) for s, tma in itertools.product((3, 4, 6), (False, True))]
    + [T(64, 128, 4, 4, True), T(64, 128, 8, 4, True)],
    128: [T(128, 64, 4, s, tma) for s, tma in itertools.product((2, 3, 4), (False, True))]
    + [T(64, 64, 4, 4, True), T(64, 128, 4, 4, True)],
    256: [T(128, 64, 4, 3, True), T(128, 64, 4, 4, True), T(64, 128, 4, 4, True), T(256, 64, 8, 3, True)],
}
PARTS = {"qkv": (1, 2), "o": (1, 2, 4), "gate_up": (1,), "down": (1, 2, 4)}


def note(*words):
    print(f"[{time.time() - started:5.1f}]", *words, flush=True)


def matrix(w):
    out = BlockMatrix.poisoned(w.shape, w.device)
    quantise_blocks(w, out)
    return out


def attempt(function):
    try:
        return function()
    except Exception as error:
        return repr(error)[:60]


def compile_all():
    x, w = weight(256, 512), matrix(weight(128, 512))
    rows = {m: quantise_rows(x[:m]) for m in TILES}
    jobs = [(m, t, p) for m in TILES for t in TILES[m] for p in (1, 2)]
    with ThreadPoolExecutor(16) as pool:
        results = list(
            pool.map(lambda j: attempt(lambda: fp8_linear_triton(rows[j[0]], w, j[1], j[2])), jobs)
        )
    note(
        len(jobs),
        "variants compiled;",
        "failed:",
        [(j[1], r) for j, r in zip(jobs, results, strict=True) if isinstance(r, str)],
    )
    reference = fp8_linear_triton(quantise_rows(x), w, T(64, 64, 4, 4), 2)
    exact = fp8_linear_reference(quantise_rows(x), w).float()
    note("relative error of the product:", float((reference.sum(0) - exact).norm() / exact.norm()))
    for (m, t, p), r in zip(jobs, results, strict=True):
        if p == 2 and not isinstance(r, str) and not torch.equal(r, reference[:, :m]):
            note("BITS DIFFER", m, t, float((r - reference[:, :m]).abs().max()))


def tiles():
    norm_weight, tiny = weight(4096), weight(1, 4096)
    totals = {}
    for op, (n, k, copies) in OPS.items():
        plain = [weight(n, k) for _ in range(copies)]
        weights = [matrix(w) for w in plain]
        for m, candidates in TILES.items():
            x = weight(m, k)
            rows = quantise_rows(x)
            runs = {("bf16", 1): lambda i: linear(x, plain[i])}
            if m >= 32:
                runs["cublas", 1] = lambda i: fp8_linear_cublas(rows, weights[i])
            runs |= {
                (t, p): (lambda i, t=t, p=p: fp8_linear_triton(rows, weights[i], t, p))
                for t in candidates
                for p in PARTS[op]
            }
            times = {}
            for key, call in runs.items():

                def chain():
                    for i in range(copies):
                        norm.rms_norm(tiny, norm_weight, 1e-6)
                        call(i)

                value = attempt(lambda: time_graph(graph_of(chain), 3)[0] / copies * 1e3)
                if isinstance(value, str):
                    note(op, m, key, value)
                else:
                    times[key] = value
            ranked = sorted((key for key in times if isinstance(key[0], T)), key=times.get)
            others = {key[0]: round(times[key], 1) for key in times if not isinstance(key[0], T)}
            best_by_parts = {p: min(times[key] for key in ranked if key[1] == p) for p in PARTS[op]}
            totals.setdefault(m, {})[op] = min(times[ranked[0]], others.get("cublas", 1e9))
            show = " ".join(
                f"{t.rows}x{t.cols}w{t.warps}s{t.stages}{'T' if t.tma else ''}/{p}={times[t, p]:.1f}"
                for t, p in ranked[:7]
            )
            note(
                f"{op} M={m}: {show} | {others} | by parts",
                {p: round(v, 1) for p, v in best_by_parts.items()},
                f"ideal {n * k / 4.575e6:.1f}",
            )
    for m, by_op in totals.items():
        note(
            f"M={m}: best layer GEMMs incl. a small kernel each: {sum(by_op.values()) * LAYERS / 1e3:.2f} ms"
        )


def attention():
    for context, rows in ((256, 1), (256, 64), (256, 256), (1024, 16), (3000, 8), (3000, 64), (8000, 32)):
        blocks_per_row = -(-(context + 1) // 16)
        blocks = rows * blocks_per_row
        table = torch.randperm(blocks, device="cuda").int().view(rows, blocks_per_row)
        contexts = torch.full((rows,), context, dtype=torch.int32, device="cuda")
        q = weight(rows, 1, HEADS, DIM) * 50
        copies = max(1, min(8, int(3e8 // (blocks * 16 * KV_HEADS * DIM * 4))))
        k = [torch.randn(blocks, 16, KV_HEADS, DIM, device="cuda").bfloat16() for _ in range(copies)]
        v = [torch.randn(blocks, 16, KV_HEADS, DIM, device="cuda").bfloat16() for _ in range(copies)]
        scale = torch.full((KV_HEADS,), 0.012, device="cuda")
        k8, v8 = ([to_e4m3(x.float() / 0.012) for x in y] for y in (k, v))
        wide = graph_of(
            lambda: [paged_attention(q, a, b, table, contexts) for a, b in zip(k, v, strict=True)]
        )
        narrow = graph_of(
            lambda: [
                paged_attention(q, a, b, table, contexts, scale, scale) for a, b in zip(k8, v8, strict=True)
            ]
        )
        a, b = (
            paged_attention(q, k[0], v[0], table, contexts),
            paged_attention(q, k8[0], v8[0], table, contexts, scale, scale),
        )
        times = [time_graph(g, 5, 4)[0] / copies * 1e3 for g in (wide, narrow)]
        note(
            f"attention {context} x {rows}: bf16 {times[0]:.1f} us, fp8 {times[1]:.1f} us, difference {float((a - b).norm() / a.norm()):.3f}"
        )


def sync():
    layers = [weight(n, k) for _ in range(LAYERS) for n, k, _ in OPS.values()]
    out = [BlockMatrix.poisoned(w.shape, w.device) for w in layers]
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for w, o in zip(layers, out, strict=True):
            quantise_blocks(w, o)
        torch.cuda.synchronize()
        note(f"weight sync: {(time.perf_counter() - start) * 1e3:.2f} ms")


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["check", "tiles", "attention", "sync"]
    for name in chosen:
        note(name)
        {"check": compile_all, "tiles": tiles, "attention": attention, "sync": sync}[name]()
