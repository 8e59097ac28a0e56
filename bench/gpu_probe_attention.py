"""Decode attention by how widely a row is shared: microseconds per layer, beside reading the KV at 4.575 TB/s.

Run on the device machine: PYTHONPATH=src:bench python3 bench/gpu_probe_attention.py
"""

import torch
from gpu_probe_step import graph_of, time_graph

from paceline.kernels.paged_attention import paged_attention_triton

HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 32, 8, 128, 16, 12


def main() -> None:
    for context in (256, 1024, 3000):
        for rows in (1, 4, 8, 16, 24, 32, 64, 128, 256):
            if rows * context > 200_000:
                continue
            per_row = -(-(context + 700) // BLOCK)
            shape = (rows * per_row, BLOCK, KV_HEADS, DIM)
            caches = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in range(LAYERS)]
            table = torch.randperm(rows * per_row, device="cuda").int().view(rows, per_row)
            q = torch.randn(rows, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
            contexts = torch.full((rows,), context, device="cuda", dtype=torch.int64)
            ideal = rows * context * KV_HEADS * DIM * 4 / 4.575e6
            line = []
            for fill in (1, 2, 4, 8):
                for stages in (1, 2):

                    def run():
                        for k, v in caches:
                            paged_attention_triton(q, k, v, table, contexts, fill, stages)  # noqa: B023

                    ms, _ = time_graph(graph_of(run), repeats=5, inner=3)
                    line.append(f"{ms / LAYERS * 1e3:6.1f}")
            print(f"ctx {context} rows {rows:>3} ideal {ideal:5.1f} us | fill x stages (1,1)(1,2)(2,1)...(8,2): {' '.join(line)}", flush=True)


main()
