"""Second GPU call: GEMM variants behind a small dependent kernel (as in a layer), attention configurations, small kernels."""

import json
import os
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import gpu_probe_kernels as G
import gpu_probe_step as S
import torch
import torch.nn.functional as F
from gpu_probe_step import graph_of, time_graph, weight

from paceline.kernels import norm, paged_attention as pa, prefill_attention as pf, rope_kv, sampler, swiglu

started = time.time()
OPS = {"qkv": (6144, 4096, 10), "o": (4096, 4096, 12), "gate_up": (24576, 4096, 4), "down": (4096, 12288, 6), "head": (151936, 4096, 2)}
SMALL = [(16, 32, 256, 4, 4), (16, 32, 256, 4, 6), (16, 64, 256, 4, 4), (16, 64, 128, 4, 6), (16, 32, 128, 4, 8), (64, 32, 256, 4, 4), (64, 32, 128, 4, 6), (64, 64, 128, 4, 5), (64, 64, 64, 4, 6)]
LARGE = {
    128: [(128, 64, 64, 4, 6), (128, 64, 64, 8, 6), (128, 128, 64, 8, 4), (128, 128, 64, 8, 6), (128, 32, 128, 4, 5), (128, 64, 128, 8, 4), (64, 64, 128, 4, 4), (128, 32, 64, 4, 8)],
    256: [(128, 128, 64, 8, 4), (128, 256, 64, 8, 4), (256, 64, 64, 8, 4), (256, 128, 64, 8, 4), (128, 64, 128, 4, 4), (128, 128, 64, 4, 5), (128, 128, 128, 8, 3), (256, 64, 128, 8, 2)],
    8192: [(128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 64, 8, 4)],
}  # fmt: skip
CASES = {1: [t for t in SMALL], 64: [t for t in SMALL if t[0] == 64] + [(64, 128, 64, 4, 4)], **LARGE}


def note(*words):
    print(f"[{time.time() - started:4.0f}]", *words, flush=True)


def variants(m):
    modes = {1: ("p0", "p1", "pp", "t0", "t1", "t2"), 64: ("p0", "t0", "t1")}.get(m, ("t0", "p0"))
    return [(mode, tile) for tile in CASES[m] for mode in modes]


def call(x, w, mode, tile, wide=False):
    kind, prefetch = mode[0], mode[1]
    dtype = torch.float32 if wide else None
    if kind == "t":
        return G.tma(x, w, *tile, mode=int(prefetch), out_dtype=dtype)
    return G.pointer(x, w, *tile, mode=0 if prefetch == "p" else int(prefetch), peel=prefetch == "p", out_dtype=dtype)


def compile_all():
    jobs = {(k, op == "head", mode, tile) for op, (n, k, _) in OPS.items() for m in CASES for mode, tile in variants(m)}

    def one(job):
        k, wide, mode, tile = job
        try:
            call(small_x[k], small_w[k], mode, tile, wide)
        except Exception as error:
            return job, type(error).__name__ + str(error)[:50]

    small_x, small_w = {k: weight(16, k) for k in (4096, 12288)}, {k: weight(256, k) for k in (4096, 12288)}
    with ThreadPoolExecutor(15) as pool:
        failed = dict(f for f in pool.map(one, jobs) if f)
    torch.cuda.synchronize()
    note("compiled", len(jobs), "failed", len(failed), list(failed.items())[:2])
    return set(failed)


def gemms(failed):
    table = {}
    norm_weight = weight(4096)
    for op, (n, k, copies) in OPS.items():
        weights = [weight(n, k) for _ in range(copies)]
        for m in CASES:
            if m == 8192 and op == "head":
                continue
            x, tiny = weight(m, k), weight(min(m, 256), 4096)
            pause = time_graph(graph_of(lambda: [norm.rms_norm(tiny, norm_weight, 1e-6) for _ in weights]), 3)[0]
            times = {}
            reference = None
            for mode, tile in variants(m):
                if (k, op == "head", mode, tile) in failed:
                    continue
                if op != "o" and m == 1 and mode in ("pp", "t2"):
                    continue
                try:
                    out = call(x, weights[0], mode, tile, op == "head")
                    reference = out if reference is None else reference
                    same = "" if torch.equal(out, reference) else "!"

                    def chain():
                        for w in weights:
                            norm.rms_norm(tiny, norm_weight, 1e-6)
                            call(x, w, mode, tile, op == "head")

                    times[f"{mode}:{'x'.join(map(str, tile))}{same}"] = round(time_graph(graph_of(chain), 3)[0] / copies * 1e3, 1)
                except Exception as error:
                    times[f"{mode}:{tile}:{repr(error)[:40]}"] = 1e9

            def library():
                for w in weights:
                    norm.rms_norm(tiny, norm_weight, 1e-6)
                    F.linear(x, w)

            lib = time_graph(graph_of(library), 3)[0] / copies * 1e3
            ranked = sorted(times, key=times.get)
            table[f"{op} {m}"] = {name: times[name] for name in ranked} | {"cublas": round(lib, 1)}
            best_by_mode = {}
            for name in ranked:
                best_by_mode.setdefault((name[:2], name.split(":")[1].startswith("16x")), name)
            note(f"{op} M={m} pause {pause / copies * 1e3:.1f}:", " ".join(f"{v}={times[v]}" for v in best_by_mode.values()), f"| cuBLAS {lib:.1f}", "BITS DIFFER" if any("!" in v for v in times) else "")
        del weights
        torch.cuda.empty_cache()
    with open(os.path.join(os.environ.get("OUT", "/tmp"), "tune.json"), "w") as f:
        json.dump(table, f)


def attention(model):
    original, splits = pa.launch_options, pa.multiprocessors
    layers = model.num_layers
    cases = ((1, 1, 255), (32, 1, 255), (128, 1, 255), (256, 1, 255), (256, 1, 383))
    inputs = {c: (weight(c[0], c[1], 32, 128), torch.full((c[0],), c[2], dtype=torch.int32, device="cuda")) for c in cases}
    for tile, split in ((64, 256), (64, 128), (128, 128), (32, 128), (128, 256)):
        for warps, stages in ((4, 1), (4, 2), (4, 3), (2, 1), (2, 2), (2, 3), (8, 2)):
            if tile == 128 and warps == 2 or tile == 32 and warps > 4:
                continue
            pa.TILE, pa.SPLIT = tile, split
            pa.launch_options = lambda num_warps, num_stages=1: original(warps, stages) if num_warps == 4 else original(num_warps, num_stages)
            row = []
            for c, (q, context) in inputs.items():
                for forced in ((False, True) if c[0] == 1 else (False,)):
                    pa.multiprocessors = (lambda d: 1) if forced else splits
                    try:
                        graph = graph_of(lambda: [pa.paged_attention_triton(q, model.k[i], model.v[i], model.table[: c[0]], context) for i in range(layers)])
                        row.append(f"{time_graph(graph, 3)[0] / layers * 1e3:.1f}")
                    except Exception as error:
                        row.append(repr(error)[:20])
            note(f"attention tile {tile} split {split} warps {warps} stages {stages}: R1, R1 P=1, R32, R128, R256, R256@384:", " ".join(row))
    pa.TILE, pa.SPLIT, pa.launch_options, pa.multiprocessors = 64, 256, original, splits


def small_kernels(model):
    layers = model.num_layers
    for m in (1, 32, 128, 256):
        x, w, qkv, gu = weight(m, 4096), weight(4096), weight(m, 6144), weight(m, 24576)
        positions = torch.full((m,), 255, device="cuda")
        slots = model.slots(torch.arange(m, device="cuda"), positions)
        logits = torch.randn(m, S.VOCAB, device="cuda")
        _, _, temperature, seed = S.decode_inputs(m)
        row = {
            "norm": lambda: norm.rms_norm(x, w, 1e-6),
            "norm+res": lambda: norm.rms_norm_residual(x, x, w, 1e-6),
            "rope": lambda: rope_kv.rope_and_write_kv_triton(qkv, positions, slots, model.cos, model.sin, model.k[0], model.v[0], 32, model.qk_norm, model.qk_norm),
            "silu": lambda: swiglu.silu_multiply(gu),
            "sample": lambda: sampler.sample(logits, temperature, seed, positions),
        }
        note(f"small M={m} us:", " ".join(f"{k} {time_graph(graph_of(lambda: [f() for _ in range(12)]), 3)[0] / 12 * 1e3:.1f}" for k, f in row.items()))


if __name__ == "__main__":
    failed = compile_all()
    for part in (lambda: gemms(failed),):
        try:
            part()
        except Exception:
            traceback.print_exc()
    model = S.Model(layers=8)
    for part in (small_kernels, attention):
        try:
            part(model)
        except Exception:
            traceback.print_exc()
