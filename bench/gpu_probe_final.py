"""A fake Qwen3-8B step and prefill made of the kernels alone: the table that says what the engine can reach.

Run on the device machine: PYTHONPATH=src:bench python3 bench/gpu_probe_final.py [batch sizes: only these
steps]
"""

# ruff: noqa: B023  (closures run at once)

import functools
import sys
import time

import gpu_probe_step as S
import torch
from gpu_probe_step import graph_of, time_graph

from paceline.kernels.linear import linear

started = time.time()


def note(*words):
    print(f"[{time.time() - started:4.0f}]", *words, flush=True)


def main():
    model = S.Model()
    modes = {"fast": linear, "deterministic": functools.partial(linear, deterministic=True)}
    plain = {}
    for rows in [int(a) for a in sys.argv[1:]] or (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for name, call in modes.items():
            if rows <= 64 and name == "fast":
                continue  # the same kernels
            inputs = S.decode_inputs(rows)
            ms, spread = time_graph(graph_of(lambda: model.step(*inputs, linear_=call)), repeats=11, inner=4)
            plain.setdefault(rows, ms)
            note(f"step batch {rows} {name}: {ms:.3f} ms, spread {spread:.3f}")
    if sys.argv[1:]:
        return
    for rows, queries in ((1, 4), (2, 4), (4, 4), (8, 4), (16, 4), (1, 8), (4, 8), (8, 8), (32, 4)):
        for name, call in modes.items():
            if rows * queries <= 64 and name == "fast":
                continue
            inputs = S.decode_inputs(rows, queries)
            ms, spread = time_graph(graph_of(lambda: model.step(*inputs, linear_=call)), repeats=7, inner=4)
            note(f"verify batch {rows} x {queries} {name}: {ms:.3f} ms, {ms / plain[rows]:.3f} x plain")

    rows, length = 256, 128
    tokens = torch.randint(0, S.VOCAB, (rows * length,), device="cuda")
    cu = torch.arange(0, rows * length + 1, length, device="cuda", dtype=torch.int32)
    context = torch.zeros(rows, dtype=torch.int32, device="cuda")
    positions = torch.arange(length, device="cuda").repeat(rows)
    slots = model.slots(torch.arange(rows, device="cuda").repeat_interleave(length), positions)
    for name, call in {
        "fast": linear,
        "cuBLAS only": lambda x, w, out_dtype=None: torch.mm(x, w.t()),
        "fast again": linear,
    }.items():
        run = lambda: model.prefill(tokens, cu, context, positions, slots, linear_=call)  # noqa: E731
        run()
        torch.cuda.synchronize()
        times = []
        for _ in range(3):
            t = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - t) * 1e3)
        note(f"prefill 256 x 128, {name}: {' '.join(f'{t:.0f}' for t in times)} ms")

    # One request through the whole fake model: prefill, then decode one token, against prefill of one token
    # more.
    logits = model.prefill(
        tokens[:256], cu[:3], context[:2], positions[:256], slots[:256], linear_=modes["deterministic"]
    )
    short = torch.cat([tokens[:127], tokens[128:255]])
    shorter = torch.tensor([0, 127, 254], device="cuda", dtype=torch.int32)
    keep = torch.cat([torch.arange(127), torch.arange(128, 255)]).cuda()
    model.prefill(short, shorter, context[:2], positions[keep], slots[keep], linear_=modes["deterministic"])
    kept = []

    def spy(x, w, out_dtype=None):
        out = linear(x, w, out_dtype, deterministic=True)
        if out_dtype is not None:
            kept.append(out)
        return out

    last = tokens[:256].view(2, 128)[:, 127:]
    contexts = torch.full((2,), 127, dtype=torch.int32, device="cuda")
    seed = torch.zeros(2, dtype=torch.int64, device="cuda")
    model.step(last, contexts, torch.ones(2, device="cuda"), seed, linear_=spy)
    note("36 layers, decode after prefill equals prefill, bit for bit:", torch.equal(kept[0], logits))


if __name__ == "__main__":
    main()
