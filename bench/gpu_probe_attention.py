"""Sweep of decode and prefill attention (scratch)."""

import math
import random
import sys
import time

import torch
from gpu_probe_step import graph_of, time_graph
from probe_paged_attention import paged_attention_triton as old_attention

from paceline.kernels import paged_attention as decode
from paceline.kernels import prefill_attention as prefill
from paceline.kernels.paged_attention import Launch

sys.path.insert(0, "tests/kernels")
HEADS, KV_HEADS, DIM, BLOCK, WIDTH, PROCESSORS = 32, 8, 128, 16, 4096, 132


def mixed(rows, seed=0):
    rng = random.Random(seed)
    return [max(200, min(4000, int(rng.lognormvariate(math.log(800), 0.8)))) for _ in range(rows)]


WORKLOADS = [
    *((f"{c}x{r}", [c] * r) for c, r in ((256, 32), (256, 64), (256, 128), (256, 256), (1024, 1), (1024, 4), (1024, 16), (1024, 32), (1024, 64))),
    *((f"{c}x{r}", [c] * r) for c, r in ((3000, 1), (3000, 2), (3000, 4), (3000, 8), (3000, 16), (3000, 32))),
    *((f"mixed x{r}", mixed(r)) for r in (16, 32, 64, 192)),
]
FILLS = (1, 2, 3, 4, 6, 8, 16)
SHAPES = {  # tile, group, warps, stages: fills, (combine batch, combine warps)
    (64, 256, 4, 3): (FILLS, ((8, 4),)),
    (64, 256, 4, 2): (FILLS, ((8, 4), (16, 4), (8, 1), (4, 4))),
    (64, 256, 4, 4): ((1, 2, 4, 8, 16), ((8, 4),)),
    (64, 256, 8, 2): ((2, 8), ((8, 4),)),
    (64, 256, 8, 3): ((2, 8), ((8, 4),)),
    (64, 128, 4, 2): ((2, 4, 8), ((8, 4), (16, 4))),
    (64, 128, 4, 3): ((2, 4, 8), ((8, 4), (16, 4))),
    (32, 256, 2, 3): ((1, 4, 8), ((8, 4),)),
    (32, 256, 2, 5): ((1, 4, 8), ((8, 4),)),
    (32, 128, 4, 4): ((2, 4, 8), ((8, 4),)),
    (64, 512, 4, 3): ((2, 4, 8), ((8, 4),)),
}


def main() -> None:
    begin = time.time()
    from test_attention import check_invariance

    for tile, group in ((64, 256), (64, 128)):
        decode.TILE, decode.GROUP, prefill.TILE, prefill.GROUP = tile, group, tile, group
        try:
            check_invariance(32, 8, 128, torch.bfloat16, "cuda")
            print("invariant", tile, group, f"{time.time() - begin:.1f}", flush=True)
        except AssertionError as error:
            print("NOT invariant", tile, group, str(error)[:100], flush=True)
    for sequences, new, context in ((1, 8192, 20000), (64, 128, 0), (4, 1000, 1500)):
        blocks_per = -(-(new + context) // BLOCK)
        k, v = (torch.randn(sequences * blocks_per, BLOCK, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        table = torch.randperm(sequences * blocks_per, device="cuda").int().view(sequences, blocks_per)
        q = torch.randn(sequences * new, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        bounds = torch.arange(0, sequences * new + 1, new, device="cuda", dtype=torch.int32)
        contexts = torch.full((sequences,), context, device="cuda", dtype=torch.int32)
        line = []
        for tile, group, rows, warps, stages in (
            (64, 256, 128, 8, 3), (64, 256, 128, 8, 4), (64, 256, 64, 4, 2), (64, 128, 128, 8, 3), (32, 256, 128, 8, 3)
        ):  # fmt: skip
            prefill.TILE, prefill.GROUP = tile, group
            try:
                prefill.prefill_attention_triton(q, k, v, table, bounds, contexts, rows, warps, stages)
                times = []
                for _ in range(4):
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    start.record()
                    prefill.prefill_attention_triton(q, k, v, table, bounds, contexts, rows, warps, stages)
                    end.record()
                    torch.cuda.synchronize()
                    times.append(start.elapsed_time(end))
                line.append(f"t{tile}g{group}r{rows}w{warps}s{stages}:{sorted(times)[1]:.3f}")
            except Exception as error:
                line.append(f"t{tile}r{rows}w{warps}s{stages}:{type(error).__name__}")
        print(f"prefill {sequences}x{new}+{context}", *line, flush=True)
    print(f"{time.time() - begin:.1f} s", flush=True)

    for name, lengths in WORKLOADS:
        if time.time() - begin > float(sys.argv[1]):
            break
        rows, tokens = len(lengths), sum(lengths)
        layers = max(2, min(12, 8_000_000_000 // (tokens * 4096)))
        blocks = [-(-(n + 1) // BLOCK) for n in lengths]
        caches = [[torch.empty(sum(blocks), BLOCK, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(2)] for _ in range(layers)]
        order, used = torch.randperm(sum(blocks)).int(), 0
        table = torch.zeros(rows, WIDTH // BLOCK, dtype=torch.int32)
        for row, count in enumerate(blocks):
            table[row, :count] = order[used : used + count]
            used += count
        table = table.cuda()
        q = torch.randn(rows, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        contexts = torch.tensor(lengths, device="cuda", dtype=torch.int64)

        def timed(attend, *args):
            def run():
                for k, v in caches:  # noqa: B023
                    attend(q, k, v, table, contexts, *args)  # noqa: B023

            ms, _ = time_graph(graph_of(run), repeats=3, inner=3)
            return ms / layers * 1e3  # noqa: B023

        results = {"old": timed(old_attention)}
        expected = old_attention(q, *caches[0], table, contexts).float()
        for (tile, group, warps, stages), (fills, minima) in SHAPES.items():
            decode.TILE, decode.GROUP = tile, group
            seen = set()
            for fill in fills:
                programs = min(-(-WIDTH // group), -(-fill * PROCESSORS // (rows * KV_HEADS)))
                for batch, combine_warps in minima:
                    if programs == 1:
                        batch, combine_warps = 8, 4
                    launch = Launch(programs, stages, warps, batch, combine_warps)
                    if launch in seen:
                        continue
                    seen.add(launch)
                    label = f"t{tile}g{group}w{warps}s{stages}P{programs}" + (f"c{batch},{combine_warps}" if (batch, combine_warps) != (8, 4) else "")
                    try:
                        out = decode.paged_attention_triton(q, *caches[0], table, contexts, launch).float()
                        error = (out - expected).norm() / expected.norm()
                        results[label + ("" if error < 1e-2 else f"WRONG{error:.1e}")] = timed(decode.paged_attention_triton, launch)
                    except Exception as error:
                        results[label + type(error).__name__] = math.inf
        full = " ".join(f"{label}:{us:.1f}" for label, us in results.items())
        with open(f"{sys.argv[2]}/full.txt", "a") as log:
            log.write(f"{name} {full}\n")
        best = " ".join(f"{label}:{us:.1f}" for label, us in sorted(results.items(), key=lambda r: r[1])[:6])
        print(f"{name} ideal {tokens * 4096 / 4.575e6:.1f} old {results['old']:.1f} | {best}", flush=True)
    print(f"{time.time() - begin:.1f} s")


main()
