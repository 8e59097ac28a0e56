"""What the history drafter adds to a step: filing the tokens that were accepted and looking up what may
follow, in microseconds.

PYTHONPATH=src:bench python3 bench/gpu_probe_history.py
"""

from functools import partial

import torch
from gpu_probe_step import graph_of, time_graph

from paceline.kernels.history_index import HistoryIndex
from paceline.kernels.history_lookup import propose_from_history

WIDTH, PERIOD, ACCEPTED, COUNT = 16384, 97, 3, 7
STEPS = 20  # of a graph


def main() -> None:
    for rows in (1, 16, 64, 256):
        text = torch.arange(WIDTH) % PERIOD  # its own past always has what follows
        tokens = text.repeat(rows, 1).cuda()
        length = torch.full((rows,), 1000, dtype=torch.int64, device="cuda")
        slots, proposals = (
            torch.arange(rows, device="cuda"),
            torch.empty(rows, COUNT, dtype=torch.int64, device="cuda"),
        )
        index = HistoryIndex.empty(rows, 1 << 24, rows * WIDTH, 1 << 25, torch.device("cuda"))
        index.prompt_S[:] = torch.arange(rows, device="cuda") // 8

        def steps(propose: bool):
            for _ in range(STEPS):
                length.add_(ACCEPTED)  # noqa: B023
                if propose:
                    propose_from_history(slots, tokens, length, index, COUNT, proposals)  # noqa: B023

        alone, with_history = (
            time_graph(graph_of(partial(steps, propose)))[0] / STEPS for propose in (False, True)
        )
        last = int(length[0])
        found = (proposals[0].cpu() == text[last : last + COUNT]).all().item()
        print(
            f"{rows:>4} rows: {1e3 * (with_history - alone):.1f} us for {COUNT} proposals (found: {found})",
            flush=True,
        )


main()
