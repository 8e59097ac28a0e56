"""Third GPU call: persistent and peeled GEMMs, cuBLAS against TMA at middle sizes, attention choices, bit equality of prefill."""

import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import gpu_probe_kernels as G
import gpu_probe_step as S
import torch
import torch.nn.functional as F
from gpu_probe_step import graph_of, time_graph, weight

from paceline.kernels import linear as L, norm, paged_attention as pa, prefill_attention as pf

started = time.time()
OPS = {"qkv": (6144, 4096, 10), "o": (4096, 4096, 12), "gate_up": (24576, 4096, 4), "down": (4096, 12288, 6), "head": (151936, 4096, 2)}
TILES = {
    1: [(16, 32, 256, 4, 4), (16, 32, 256, 4, 6), (16, 64, 256, 4, 4), (16, 64, 128, 4, 6), (16, 64, 256, 4, 5), (16, 32, 512, 4, 4), (64, 32, 128, 4, 6)],
    64: [(64, 32, 128, 4, 6), (64, 64, 128, 4, 4), (64, 64, 64, 4, 6), (64, 128, 64, 4, 4), (64, 32, 256, 4, 3)],
}


def note(*words):
    print(f"[{time.time() - started:4.0f}]", *words, flush=True)


KINDS = {
    "plain": lambda x, w, t, d: G.pointer(x, w, *t, out_dtype=d),
    "peel": lambda x, w, t, d: G.pointer(x, w, *t, peel=True, out_dtype=d),
    "pers1": lambda x, w, t, d: G.persistent(x, w, *t, per_sm=1, out_dtype=d),
    "pers2": lambda x, w, t, d: G.persistent(x, w, *t, per_sm=2, out_dtype=d),
}


def attempt(function):
    try:
        return function()
    except Exception as error:
        return repr(error)[:30]


def streaming():
    small_w = {k: weight(512, k) for k in (4096, 12288)}
    small_x = {k: weight(16, k) for k in (4096, 12288)}
    jobs = [(k, name, t, d) for k in small_w for name in KINDS for m in TILES for t in TILES[m] for d in (None, torch.float32)]
    with ThreadPoolExecutor(15) as pool:
        list(pool.map(lambda j: attempt(lambda: KINDS[j[1]](small_x[j[0]], small_w[j[0]], j[2], j[3])), jobs))
    torch.cuda.synchronize()
    note("compiled", len(jobs))
    norm_weight, tiny = weight(4096), weight(1, 4096)
    for op, (n, k, copies) in OPS.items():
        weights = [weight(n, k) for _ in range(copies)]
        dtype = torch.float32 if op == "head" else None
        for m, tiles in TILES.items():
            x, times = weight(m, k), {}
            for t in tiles:
                for name, kind in KINDS.items():
                    def chain():
                        for w in weights:
                            norm.rms_norm(tiny, norm_weight, 1e-6)
                            kind(x, w, t, dtype)

                    result = attempt(lambda: time_graph(graph_of(chain), 3)[0] / copies * 1e3)
                    if not isinstance(result, str):
                        times[f"{name}:{'x'.join(map(str, t))}"] = result
            ranked = sorted(times, key=times.get)
            first = {}
            for v in ranked:
                first.setdefault(v.split(":")[0], v)
            note(f"{op} M={m}:", " ".join(f"{v}={times[v]:.1f}" for v in dict.fromkeys([*first.values(), *ranked[:4]])))
        del weights
        torch.cuda.empty_cache()


def middle():
    tiles = [L.Tile(128, 256, 64, 8, 3), L.Tile(128, 128, 64, 4, 5), L.Tile(128, 128, 64, 8, 4), L.Tile(128, 64, 128, 4, 4), L.Tile(256, 128, 64, 8, 3)]
    for op, (n, k, copies) in list(OPS.items())[:4]:
        weights = [weight(n, k) for _ in range(copies)]
        for m in (512, 1024, 2048):
            x = weight(m, k)
            row = [f"cuBLAS {time_graph(graph_of(lambda: [F.linear(x, w) for w in weights]), 3)[0] / copies * 1e3:.1f}"]
            for t in tiles:
                value = attempt(lambda: time_graph(graph_of(lambda: [L.linear_triton(x, w, tile=t) for w in weights]), 3)[0] / copies * 1e3)
                row.append(f"{t.rows}x{t.cols}x{t.depth}w{t.warps} {value if isinstance(value, str) else round(value, 1)}")
            note(f"{op} M={m}:", " ".join(row))
        del weights


def attention(model):
    original, processors = pa.launch_options, pa.multiprocessors
    layers = model.num_layers
    for split, warps, stages in ((128, 4, 1), (128, 4, 2), (64, 4, 2), (64, 2, 2), (128, 8, 1)):
        pa.SPLIT = split
        pa.launch_options = lambda num_warps, num_stages=1: original(warps, stages) if num_warps == 4 else original(num_warps, num_stages)
        row = []
        for rows, queries, context in ((1, 1, 255), (1, 4, 255), (8, 1, 255), (16, 1, 255), (32, 1, 255), (64, 1, 255), (128, 1, 255), (256, 1, 255)):
            q, contexts = weight(rows, queries, 32, 128), torch.full((rows,), context, dtype=torch.int32, device="cuda")
            for factor in (0, 1, 2) if rows <= 64 else (0,):
                pa.multiprocessors = lambda d: 66 * factor or 1
                run = lambda: [pa.paged_attention_triton(q, model.k[i], model.v[i], model.table[:rows], contexts) for i in range(layers)]  # noqa: E731
                value = attempt(lambda: time_graph(graph_of(run), 3)[0] / layers * 1e3)
                row.append(value if isinstance(value, str) else f"{value:.1f}")
            row.append("|")
        note(f"attention split {split} warps {warps} stages {stages}, programs for 0/1/2 x 132; R 1, 1xQ4, 8, 16, 32, 64, 128, 256:", " ".join(row))
    pa.SPLIT, pa.launch_options, pa.multiprocessors = 128, original, processors


def prefill(model):
    rows, length = 256, 128
    q = weight(rows * length, 32, 128)
    cu = torch.arange(0, rows * length + 1, length, device="cuda", dtype=torch.int32)
    context = torch.zeros(rows, dtype=torch.int32, device="cuda")
    outs = {}
    for query_rows, warps in ((128, 8), (64, 4), (32, 4), (128, 4)):
        pf.QUERY_ROWS, pf.WARPS = query_rows, warps
        run = lambda: pf.prefill_attention(q, model.k[0], model.v[0], model.table, cu, context)  # noqa: E731
        value = attempt(lambda: time_graph(graph_of(run), 3)[0] * 1e3)
        outs[query_rows, warps] = attempt(run)
        note(f"prefill attention rows {query_rows} warps {warps}: {value} us")
    first = outs[32, 4]
    note("prefill bits equal to mma 32 rows:", {k: (o if isinstance(o, str) else torch.equal(o, first)) for k, o in outs.items()})
    position = torch.arange(5, 128, 11, device="cuda")
    for p in position.tolist():
        mine = q.view(rows, length, 32, 128)[:, p : p + 1].contiguous()
        out = pa.paged_attention(mine, model.k[0], model.v[0], model.table, torch.full((rows,), p, dtype=torch.int32, device="cuda"))
        if not torch.equal(out[:, 0], first.view(rows, length, 32, 128)[:, p]):
            note("decode differs from prefill at", p, (out[:, 0] != first.view(rows, length, 32, 128)[:, p]).float().mean().item())
    pf.QUERY_ROWS, pf.WARPS = 128, 8


if __name__ == "__main__":
    model = S.Model(layers=4)
    for part in (streaming, middle, lambda: attention(model), lambda: prefill(model)):
        try:
            part()
        except Exception:
            traceback.print_exc()
