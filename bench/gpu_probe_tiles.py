"""GEMM tiles behind a small dependent kernel, as in a layer, each checked against one reference tile bit for
bit.

Run on the device machine: PYTHONPATH=src:bench python3 bench/gpu_probe_tiles.py
"""

# ruff: noqa: B023  (closures run at once)

import time
from concurrent.futures import ThreadPoolExecutor

import torch
from gpu_probe_step import graph_of, time_graph, weight

from paceline.kernels import norm
from paceline.kernels.linear import Tile, choose_tile, linear_triton

started = time.time()
OPS = {
    "qkv": (6144, 4096, 10),
    "o": (4096, 4096, 12),
    "gate_up": (24576, 4096, 4),
    "down": (4096, 12288, 6),
    "head": (151936, 4096, 2),
}


def tiles(rows, *shapes):
    return [Tile(rows, *shape) for shape in shapes]


TILES = {
    32: tiles(
        32,
        (64, 256, 4, 4),
        (64, 128, 4, 6),
        (64, 256, 4, 3),
        (32, 256, 4, 5),
        (32, 512, 4, 3),
        (128, 128, 4, 4),
        (64, 128, 8, 6),
    ),
    64: tiles(
        64,
        (128, 128, 4, 3),
        (128, 128, 8, 3),
        (64, 128, 8, 5),
        (64, 64, 4, 6),
        (64, 128, 4, 5),
        (128, 64, 4, 4),
        (32, 256, 4, 4),
    ),
}


def attempt(function):
    try:
        return function()
    except Exception as error:
        return repr(error)[:30]


small = {k: (weight(64, k), weight(512, k)) for k in (4096, 12288)}
jobs = [(m, k, t, d) for m in TILES for t in TILES[m] for k in small for d in (None, torch.float32)]
with ThreadPoolExecutor(15) as pool:
    list(
        pool.map(
            lambda j: attempt(lambda: linear_triton(small[j[1]][0][: j[0]], small[j[1]][1], j[3], j[2])), jobs
        )
    )
torch.cuda.synchronize()
for k, (x, w) in small.items():
    reference = linear_triton(x, w, torch.float32, Tile(64, 32, 128, 4, 4))
    different = []
    for m, candidates in TILES.items():
        for t in candidates:
            out = attempt(lambda: linear_triton(x[:m], w, torch.float32, t))
            if isinstance(out, str) or not torch.equal(out, reference[:m]):
                different.append((t, out if isinstance(out, str) else "BITS"))
    print(f"[{time.time() - started:4.0f}] K={k}: tiles that fail or differ:", different, flush=True)
norm_weight, tiny = weight(4096), weight(1, 4096)
for op, (n, k, copies) in OPS.items():
    weights = [weight(n, k) for _ in range(copies)]
    dtype = torch.float32 if op == "head" else None
    for m, candidates in TILES.items():
        x, times = weight(m, k), {}
        for t in dict.fromkeys([*candidates, choose_tile(m, n)]):

            def chain():
                for w in weights:
                    norm.rms_norm(tiny, norm_weight, 1e-6)
                    linear_triton(x, w, dtype, t)

            value = attempt(lambda: time_graph(graph_of(chain), 3)[0] / copies * 1e3)
            if not isinstance(value, str):
                times[t] = value
        ranked = sorted(times, key=times.get)
        now = choose_tile(m, n)
        print(
            f"[{time.time() - started:4.0f}] {op} M={m}:",
            " ".join(f"{t.rows}x{t.cols}x{t.depth}w{t.warps}s{t.stages}={times[t]:.1f}" for t in ranked[:5]),
            f"| now {times[now]:.1f}",
            flush=True,
        )
