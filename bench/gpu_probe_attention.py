"""Decode attention by how the work is cut up: microseconds per layer, beside reading the KV at 4.575 TB/s.

PYTHONPATH=src:bench python3 bench/gpu_probe_attention.py [fp8] [verify]
"""

import math
import random
import sys

import torch
from gpu_probe_step import graph_of, time_graph

from paceline.kernels.attention_tiles import GROUP
from paceline.kernels.paged_attention import paged_attention_triton
from paceline.kernels.paged_launch import Launch, default_launch
from paceline.kernels.triton_support import multiprocessors

HEADS, KV_HEADS, DIM, BLOCK, WIDTH = 32, 8, 128, 16, 4096
FP8 = "fp8" in sys.argv
KV_TYPE = torch.float8_e4m3fn if FP8 else torch.bfloat16
QUERIES = 4 if "verify" in sys.argv else 1
UNIFORM = ((256, (32, 64, 128, 256)), (1024, (1, 4, 16, 32, 64)), (3000, (1, 2, 4, 8, 16, 32)))


def mixed_lengths(rows):
    rng = random.Random(0)
    return [max(200, min(4000, int(rng.lognormvariate(math.log(800), 0.8)))) for _ in range(rows)]


def inputs(lengths):
    """(q, table, contexts, caches of several layers): enough layers that none is left in the L2 cache from
    the last replay.
    """
    blocks = [(context + QUERIES) // BLOCK + 1 for context in lengths]
    order = torch.randperm(sum(blocks)).int().split(blocks)
    table = torch.zeros(len(lengths), WIDTH // BLOCK, dtype=torch.int32)
    for row, numbers in enumerate(order):
        table[row, : len(numbers)] = numbers
    layers = max(2, min(12, 4_000_000_000 // (sum(lengths) * KV_HEADS * DIM * 4)))
    shape = (sum(blocks), BLOCK, KV_HEADS, DIM)
    caches = [
        [torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(KV_TYPE) for _ in range(2)]
        for _ in range(layers)
    ]
    q = torch.randn(len(lengths), QUERIES, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    return q, table.cuda(), torch.tensor(lengths, device="cuda", dtype=torch.int32), caches


def label(launch: Launch) -> str:
    registers, warps = (
        f"r{launch.registers}" if launch.registers else "",
        "" if launch.warps is None else f"w{launch.warps}",
    )
    return f"{launch.programs}/{launch.stages}{registers}{warps}" + (
        f"x{launch.resident}" if launch.resident else ""
    )


def main() -> None:
    processors = multiprocessors(torch.device("cuda"))
    scale = torch.full((KV_HEADS,), 0.01, device="cuda")
    scales = dict(k_scale_H=scale, v_scale_H=scale, quantise=True) if FP8 else {}
    workloads = [(f"{context} x {rows}", [context] * rows) for context, counts in UNIFORM for rows in counts]
    workloads += [(f"mixed x {rows}", mixed_lengths(rows)) for rows in (16, 32, 64, 128, 192)]
    for name, lengths in workloads:
        q, table, contexts, caches = inputs(lengths)
        tiles, max_groups = len(lengths) * KV_HEADS, WIDTH // GROUP
        shares = sorted({max(1, min(max_groups, fill * processors // tiles)) for fill in (1, 2, 4, 8, 16)})
        launches = {Launch(1, stages) for stages in (2, 3, 4, 6) if 1 in shares}
        launches |= {
            Launch(p, stages, resident=r) for p in shares if p > 1 for stages in (2, 3) for r in (2, 3, 4)
        }
        if len(lengths) >= 64:  # many programs: how many run at once matters
            ways = ((None, 2), (None, 4)) if QUERIES > 1 and not FP8 else ((128, None), (None, 2))
            launches |= {
                Launch(1, stages, registers, warps) for stages in (2, 3, 4) for registers, warps in ways
            }
        chosen = default_launch(processors, tiles, max_groups)
        results = {}
        for launch in launches | {chosen}:

            def run():
                for k, v in caches:  # noqa: B023
                    paged_attention_triton(q, k, v, table, contexts, launch, **scales)  # noqa: B023

            results[launch] = time_graph(graph_of(run), repeats=3, inner=3)[0] / len(caches) * 1e3
        ideal = sum(lengths) * KV_HEADS * DIM * 2 * KV_TYPE.itemsize / 4.575e6
        others = " ".join(
            f"{label(launch)}:{us:.1f}" for launch, us in sorted(results.items(), key=lambda item: item[1])
        )
        print(
            f"{name}: ideal {ideal:.1f}, default {results[chosen]:.1f} | programs/stages {others}", flush=True
        )


main()
