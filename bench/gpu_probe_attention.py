"""Decode attention variants: microseconds per layer, beside reading the KV at 4.575 TB/s.

Run on the device machine: PYTHONPATH=src:bench python3 bench/gpu_probe_attention.py
"""

import itertools

import torch
from gpu_probe_step import graph_of, time_graph
from probe_paged_attention import paged_attention_triton

HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 32, 8, 128, 16, 12


def main() -> None:
    for context, rows in ((256, 32), (256, 64), (256, 128), (256, 256), (1024, 16), (1024, 64), (3000, 8), (3000, 1)):
        per_row = -(-(context + 700) // BLOCK)
        shape = (rows * per_row, BLOCK, KV_HEADS, DIM)
        caches = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in range(LAYERS)]
        table = torch.randperm(rows * per_row, device="cuda").int().view(rows, per_row)
        q = torch.randn(rows, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        contexts = torch.full((rows,), context, device="cuda", dtype=torch.int64)
        ideal = rows * context * KV_HEADS * DIM * 4 / 4.575e6
        results = []
        for split, warps, stages, head_major, fill in itertools.product((32, 64, 128), (2, 4, 8), (1, 2, 3, 4), (False, True), (1, 2)):
            if stages > 2 and split == 128 or (fill == 2 and rows * 8 > 264):
                continue

            def run():
                for k, v in caches:
                    paged_attention_triton(q, k, v, table, contexts, fill, stages, split, warps, head_major)  # noqa: B023

            try:
                ms, _ = time_graph(graph_of(run), repeats=3, inner=3)
            except Exception:
                continue
            results.append((ms / LAYERS * 1e3, f"s{split}w{warps}st{stages}{'H' if head_major else 'N'}f{fill}"))
        results.sort()
        now = next(r for r in results if r[1] == f"s128w4st{2 if rows * 8 > 528 else 1}Nf1")
        best_n = next(r for r in results if "N" in r[1])
        shown = " ".join(f"{name}:{us:.1f}" for us, name in results[:7])
        print(f"ctx {context} rows {rows} ideal {ideal:.1f} now {now[0]:.1f} best N {best_n[1]}:{best_n[0]:.1f} | {shown}", flush=True)


main()
