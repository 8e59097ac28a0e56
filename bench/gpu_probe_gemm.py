"""First GPU call: which GEMM tiles agree bit for bit, which are fastest, and what a fake decode step takes with them.

Run on the device machine: PYTHONPATH=src:bench python3 bench/gpu_probe_gemm.py
"""

import itertools
import json
import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
import torch.nn.functional as F
from gpu_probe_step import FF, HIDDEN, VOCAB, Model, decode_inputs, graph_of, time_graph, weight

from paceline.kernels import linear as L
from paceline.kernels import triton_support
from paceline.kernels.linear import Tile, linear_triton
from paceline.kernels.swiglu import silu_multiply

started = time.time()
BATCHES = (1, 8, 32, 64, 128, 256)
ROWS16 = [Tile(16, c, d, w, s) for c, d, w, s in ((16, 256, 4, 5), (32, 256, 4, 4), (32, 128, 4, 7), (64, 128, 4, 6), (32, 256, 4, 6), (64, 256, 4, 4), (16, 512, 4, 4), (32, 256, 2, 4))]
ROWS32 = [Tile(32, c, d, w, s) for c, d, w, s in ((32, 128, 4, 6), (32, 256, 4, 4), (64, 128, 4, 5))]
ROWS64 = [Tile(64, c, d, w, s) for c, d, w, s in ((16, 128, 4, 6), (32, 128, 4, 6), (32, 256, 4, 4), (64, 128, 4, 5), (32, 128, 4, 4), (64, 64, 4, 6), (128, 64, 4, 6), (128, 64, 4, 4))]
ROWS128 = [Tile(128, c, d, w, s) for c, d, w, s in ((32, 64, 4, 6), (64, 64, 4, 6), (64, 64, 8, 6), (32, 128, 4, 4), (128, 64, 8, 4), (64, 64, 4, 4), (128, 64, 8, 6), (128, 64, 4, 3))] + [Tile(64, 64, 128, 4, 4)]
ROWS256 = [Tile(r, c, d, w, s) for r, c, d, w, s in ((128, 128, 64, 8, 4), (256, 64, 64, 8, 4), (256, 128, 64, 8, 3), (256, 32, 64, 8, 5), (128, 64, 64, 4, 4), (128, 256, 64, 8, 3), (128, 128, 64, 4, 4))]
CANDIDATES = {1: ROWS16 + ROWS64[:6], 8: ROWS16 + ROWS64[:6], 32: ROWS32 + ROWS64, 64: ROWS64, 128: ROWS128, 256: ROWS256}
OPS = {  # weight rows, depth, residual, swiglu, float32 out, copies (larger than L2 together)
    "qkv": (6144, HIDDEN, False, False, False, 12),
    "o": (HIDDEN, HIDDEN, True, False, False, 12),
    "gate_up": (2 * FF, HIDDEN, False, True, False, 6),
    "down": (HIDDEN, FF, True, False, False, 8),
    "head": (VOCAB, HIDDEN, False, False, True, 2),
}


def note(*words):
    print(f"[{time.time() - started:5.0f}s]", *words, flush=True)


def run(op, x, w, residual, tile):
    _, _, has_residual, swiglu, wide, _ = OPS[op]
    return linear_triton(x, w, residual if has_residual else None, swiglu, torch.float32 if wide else None, tile)


def cublas(op, x, w, residual):
    _, _, has_residual, swiglu, wide, _ = OPS[op]
    if has_residual:
        return torch.addmm(residual, x, w.t())
    out = F.linear(x, w)
    return silu_multiply(out) if swiglu else out.float() if wide else out


def compile_all(jobs=None):
    small = {}
    for op, (n, k, *_) in OPS.items():
        small[op] = (weight(16, k), weight(256 if op != "gate_up" else 512, k), weight(16, 256))

    def one(job):
        op, tile = job
        try:
            run(op, *small[op], tile)
        except Exception as error:
            return op, tile, type(error).__name__
        return None

    tiles = {replace(t, prefetch=65536) for t in itertools.chain(*CANDIDATES.values())}
    jobs = jobs or [(op, t) for op in OPS for t in tiles]
    with ThreadPoolExecutor(14) as pool:
        failed = [f for f in pool.map(one, jobs) if f]
    torch.cuda.synchronize()
    note("compiled", len(jobs), "failed", [(o, t.rows, t.cols, t.depth, t.warps, t.stages, e) for o, t, e in failed][:12])
    return {(o, t) for o, t, _ in failed}


def bits(failed):
    """Every tile against one reference tile at M = 256, and rows of smaller batches against the same rows."""
    x, residual = weight(256, HIDDEN) * 50, weight(256, 1024)
    w = weight(1024, HIDDEN)
    reference = linear_triton(x, w, residual, tile=Tile(64, 32, 128, 4, 4))
    tiles = list(dict.fromkeys(itertools.chain(*CANDIDATES.values())))
    wrong = []
    for tile in tiles:
        for m in (1, 2, 7, 16, 17, 33, 64, 65, 100, 128, 129, 256):
            try:
                out = linear_triton(x[256 - m :].contiguous(), w, residual[256 - m :].contiguous(), tile=tile)
            except Exception:
                break
            if not torch.equal(out, reference[256 - m :]):
                share = (out != reference[256 - m :]).float().mean().item()
                wrong.append(((tile.rows, tile.cols, tile.depth, tile.warps), m, f"{share:.4f}"))
                break
    note("bits: tiles that differ from wgmma 64x32x128:", wrong or "none", "of", len(tiles))
    for m in (1, 8, 64, 256):
        same = torch.equal(torch.addmm(residual[:m], x[:m], w.t()), reference[:m])
        share = (torch.addmm(residual[:m], x[:m], w.t()) != reference[:m]).float().mean().item()
        note("bits: cuBLAS M", m, "equal" if same else f"differs in {share:.4f}")
    big, big_w = weight(8192, HIDDEN), weight(6144, HIDDEN)
    share = (F.linear(big, big_w) != linear_triton(big, big_w, tile=Tile(128, 128, 64, 8, 4))).float().mean().item()
    note(f"bits: cuBLAS M 8192 differs in {share:.5f}")
    exact = x.double() @ w.double().t() + residual.double()
    note("error vs float64:", f"{((reference.double() - exact).norm() / exact.norm()).item():.2e}")


def tune(failed):
    best, table = {}, {}
    for op, (n, k, has_residual, swiglu, wide, copies) in OPS.items():
        weights = [weight(n, k) for _ in range(copies)]
        for m in BATCHES:
            x = weight(m, k)
            residual = weight(m, n)
            times = {}
            for tile in CANDIDATES[m]:
                tile = replace(tile, prefetch=65536)
                if (op, tile) in failed:
                    continue
                graph = graph_of(lambda: [run(op, x, w, residual, tile) for w in weights])
                times[tile] = time_graph(graph, 3, 2)[0] / copies * 1e3
            library = time_graph(graph_of(lambda: [cublas(op, x, w, residual) for w in weights]), 3, 2)[0] / copies * 1e3
            ranked = sorted(times, key=times.get)
            best[op, m] = ranked[0]
            wg = [t for t in ranked if t.rows >= 64]
            table[f"{op} {m}"] = [(t.rows, t.cols, t.depth, t.warps, t.stages, round(times[t], 1)) for t in ranked] + [round(library, 1)]
            show = " ".join(f"{t.rows}x{t.cols}x{t.depth}w{t.warps}s{t.stages}:{times[t]:.1f}" for t in ranked[:3])
            extra = f" wgmma {wg[0].rows}x{wg[0].cols}x{wg[0].depth}s{wg[0].stages}:{times[wg[0]]:.1f}" if ranked[0].rows < 64 else ""
            note(f"{op:8s} M={m:3d} us: {show}{extra} | cuBLAS {library:.1f}")
        del weights
        torch.cuda.empty_cache()
    with open(os.path.join(os.environ.get("OUT", "/tmp"), "gemm.json"), "w") as f:
        json.dump(table, f)
    return best


def linear_with(model, best, m, prefetch, library=False):
    names = {id(w): op for op in ("qkv", "o", "gate_up", "down") for w in getattr(model, op)}
    names[id(model.head)] = "head"

    def call(x, w, residual_MN=None, swiglu=False, out_dtype=None):
        op = names[id(w)]
        if library:
            return cublas(op, x, w, residual_MN)
        return linear_triton(x, w, residual_MN, swiglu, out_dtype, replace(best[op, m], prefetch=prefetch))

    return call


def steps(best):
    model = Model()
    note("model ready, GiB", torch.cuda.memory_allocated() >> 30)

    def others_only(x, w, residual_MN=None, swiglu=False, out_dtype=None):
        width = w.shape[0] // 2 if swiglu else w.shape[0]
        return residual_MN if residual_MN is not None else scratch[(x.shape[0], width, out_dtype)]

    for m in BATCHES:
        inputs = decode_inputs(m)
        scratch = {(m, width, t): torch.randn(m, width, device="cuda").to(t or torch.bfloat16) for width, t in ((6144, None), (FF, None), (VOCAB, torch.float32))}
        row = {}
        variants = {
            "pf0": linear_with(model, best, m, 0), "pf64k": linear_with(model, best, m, 65536),
            "pf128k": linear_with(model, best, m, 131072), "pf256k": linear_with(model, best, m, 262144),
            "cuBLAS": linear_with(model, best, m, 0, True), "others": others_only,
        }  # fmt: skip
        for name, call in variants.items():
            try:
                ms, spread = time_graph(graph_of(lambda: model.step(*inputs, linear_=call)))
                row[name] = f"{ms:.3f}±{spread:.3f}"
            except Exception as error:
                row[name] = repr(error)[:60]
        triton_support.has_dependent_launch.cache_clear()
        enabled, triton_support.has_dependent_launch = triton_support.has_dependent_launch, lambda i=0: False
        for name in ("pf0", "others") if m in (1, 64) else ():
            try:
                row[name + " noPDL"] = f"{time_graph(graph_of(lambda: model.step(*inputs, linear_=variants[name])))[0]:.3f}"
            except Exception as error:
                row[name + " noPDL"] = repr(error)[:60]
        triton_support.has_dependent_launch = enabled
        note(f"step M={m}:", " ".join(f"{k} {v}" for k, v in row.items()))
        for q in (4,) if m <= 16 else ():
            mq = min(b for b in BATCHES if b >= m * q)
            inputs = decode_inputs(m, q)
            ms, spread = time_graph(graph_of(lambda: model.step(*inputs, linear_=linear_with(model, best, mq, 65536))))
            note(f"verify R={m} Q={q}: {ms:.3f}±{spread:.3f}")


if __name__ == "__main__":
    note(torch.cuda.get_device_name(), torch.__version__, sys.version.split()[0])
    try:
        import pytest
        note("pytest", pytest.__version__)
    except ImportError:
        note("no pytest")
    failed = compile_all()
    for part in (bits,):
        try:
            part(failed)
        except Exception:
            traceback.print_exc()
    best = tune(failed)
    compile_all([(op, replace(tile, prefetch=p)) for (op, _), tile in best.items() for p in (0, 131072, 262144)])
    steps(best)
