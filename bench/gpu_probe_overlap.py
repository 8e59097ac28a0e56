"""A decode step by how much of each weight is fetched into L2 before the kernel before has finished
(`linear.PULL_BYTES`).

Run on the device machine: PYTHONPATH=src:bench python3 bench/gpu_probe_overlap.py
"""

# ruff: noqa: B023  (closures run at once)

import gpu_probe_step as S
from gpu_probe_step import graph_of, time_graph

from paceline.kernels import linear


def main() -> None:
    model = S.Model(max_rows=32, max_tokens=3072)
    for rows, context in ((1, 300), (1, 3000), (4, 2000), (8, 300), (16, 1500), (32, 300), (32, 1000)):
        inputs = S.decode_inputs(rows, context=context)
        times = []
        for linear.PULL_BYTES in (0, 256, 512, 1024, 2048, 8192, 0):
            ms, spread = time_graph(graph_of(lambda: model.step(*inputs)), repeats=7, inner=3)
            times.append(f"{linear.PULL_BYTES}: {ms:.3f} ({spread:.3f})")
        print(f"{rows} rows, context {context}; bytes: ms (spread)", ", ".join(times), flush=True)


if __name__ == "__main__":
    main()
