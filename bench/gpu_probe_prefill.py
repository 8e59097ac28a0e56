"""Prefill attention by query tile: time, and whether the bits are those of the smallest tile (which decoding
uses).

PYTHONPATH=src python3 bench/gpu_probe_prefill.py
"""

import statistics

import torch

from paceline.kernels.prefill_attention import prefill_attention_triton

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16


def main() -> None:
    torch.manual_seed(0)
    for sequences, new, context in ((1, 8192, 0), (1, 8192, 20000), (64, 128, 0), (4, 1000, 1500)):
        blocks_per = -(-(new + context) // BLOCK)
        shape = (sequences * blocks_per, BLOCK, KV_HEADS, DIM)
        k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        table = torch.randperm(sequences * blocks_per, device="cuda").int().view(sequences, blocks_per)
        q = torch.randn(sequences * new, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        bounds = torch.arange(0, sequences * new + 1, new, device="cuda", dtype=torch.int32)
        contexts = torch.full((sequences,), context, device="cuda", dtype=torch.int32)
        base = prefill_attention_triton(q, k, v, table, bounds, contexts)
        flops = 4 * HEADS * DIM * sequences * (new * context + new * new / 2)
        for rows, warps, stages, tile, *flat in (
            (16, 4, 3, 64),
            (64, 4, 3, 64),
            (128, 8, 3, 64),
            (128, 8, 2, 128),
            (64, 4, 3, 64, True),
            (128, 8, 3, 64, True),
            (128, 8, 2, 128, True),
            (128, 8, 3, 128, True),
        ):
            name = f"{sequences}x{new}+{context} rows {rows} warps {warps} stages {stages} tile {tile}{' flat' if flat else ''}"
            try:
                run = lambda: prefill_attention_triton(
                    q, k, v, table, bounds, contexts, rows, warps, stages, tile=tile, flat=bool(flat)
                )  # noqa: B023, E731
                same = torch.equal(run(), base)
                times = []
                for _ in range(4):
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    start.record()
                    run()
                    end.record()
                    torch.cuda.synchronize()
                    times.append(start.elapsed_time(end))
                ms = statistics.median(times)
                print(f"{name}: {ms:.3f} ms, {flops / ms / 1e9:.0f} TFLOP/s, same bits {same}")
            except Exception as error:  # a tile that does not fit shared memory
                print(f"{name}: {type(error).__name__} {str(error)[:80]}")


main()
