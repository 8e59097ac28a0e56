"""CPU time of a step of the built-in policy, by rows and queries, for one or more source trees in turn.

    python benchmarks/cpu_steps.py --source src --source ../before/src --rounds 20

Every tree runs in a process of its own on one thread; the cells of all trees take turns, so that whatever
else the machine does meets all of them. Reported is the median of CPU milliseconds, not of elapsed time, and
the ratio of the last tree to the first. A step is what the engine runs: gather, forward, sample, append.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

CELLS = [(rows, queries) for rows in (1, 4, 16, 64) for queries in (1, 4, 8)]
# Tokens in a row's context: the middle of the built-in task's longer responses.
CONTEXT = 150
LENGTH_LIMIT = 512


def main() -> None:
    """Prints the table, and writes all times where `--json` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", action="append", type=Path, help="folder that holds the package")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sources = arguments.source or [Path(__file__).parents[1] / "src"]
    workers = [Worker(source) for source in sources]
    times: dict[tuple[int, int], list[list[float]]] = {cell: [[] for _ in sources] for cell in CELLS}
    for _ in range(arguments.rounds):
        for cell in CELLS:
            for column, worker in zip(times[cell], workers, strict=True):
                column.append(worker.measure(cell))
    print_table(times, [str(source) for source in sources])
    if arguments.json:
        arguments.json.write_text(
            json.dumps({f"{rows}x{queries}": columns for (rows, queries), columns in times.items()})
        )


def print_table(times: dict[tuple[int, int], list[list[float]]], names: list[str]) -> None:
    """Prints a row per cell: the median of each tree, and how many times as fast the last one is."""
    print("| rows x queries | " + " | ".join(names) + " | first / last |")
    print("|---|" + "---|" * (len(names) + 1))
    for (rows, queries), columns in times.items():
        medians = [statistics.median(column) for column in columns]
        cells = " | ".join(f"{value:.1f}" for value in medians)
        print(f"| {rows} x {queries} | {cells} | {medians[0] / medians[-1]:.2f}x |")


class Worker:
    """A process that measures steps of one source tree, a cell per line of its standard input."""

    def __init__(self, source: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def measure(self, cell: tuple[int, int]) -> float:
        """Returns the CPU milliseconds of one step."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(cell) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("a measuring process ended; its error is above")
        return float(answer)


def serve() -> None:
    """Answers cells with times until there are no more."""
    steps: dict[int, Steps] = {}
    for line in sys.stdin:
        rows, queries = json.loads(line)
        if rows not in steps:
            steps[rows] = Steps(rows)
        print(steps[rows].milliseconds(queries), flush=True)


class Steps:
    """An engine of the default recipe with so many rows in the middle of their responses."""

    def __init__(self, num_rows: int) -> None:
        import torch

        from paceline.config import load_config
        from paceline.device import prepare_device
        from paceline.engine.factory import make_engine
        from paceline.engine.rows import NewRow
        from paceline.models.source import policy_dtype, policy_folder
        from paceline.paged.cache import blocks_for
        from paceline.policy.huggingface import load_policy
        from paceline.types import SamplingParams

        config = load_config("default", [f"rollout.max_running={num_rows}", "run.device=cpu"])
        device = prepare_device(config)
        dtype = policy_dtype(config.policy, device)
        policy = load_policy(policy_folder(config.policy.path), dtype, device)
        self.engine = make_engine(policy, config.rollout, num_rows * LENGTH_LIMIT, None, 0, 400)
        self.num_rows = num_rows
        blocks = blocks_for(CONTEXT + 64)
        rows = []
        for slot in range(num_rows):
            # Rows differ in length, as they do in a rollout.
            tokens = [1 + (slot * 7 + place * 5) % 40 for place in range(CONTEXT - 40 + slot * 13 % 80)]
            first = 1 + slot * blocks
            rows.append(
                NewRow(
                    slot, tokens, LENGTH_LIMIT, slot, SamplingParams(), (), list(range(first, first + blocks))
                )
            )
        self.engine.rows.enter(rows)
        self.engine.runner.slots[:num_rows] = torch.arange(num_rows)
        self.length = self.engine.rows.state.length.clone()
        for queries in (1, 4, 8):
            self.milliseconds(queries)

    def milliseconds(self, queries: int) -> float:
        """Returns the CPU time of one step, from the same state each time."""
        import torch

        from paceline.engine.sampling import StepVariant

        state = self.engine.rows.state
        state.length.copy_(self.length)
        state.active[: self.num_rows] = True
        with torch.inference_mode():
            start = time.process_time()
            self.engine.runner.run(self.num_rows, queries, StepVariant())
            return 1e3 * (time.process_time() - start)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        main()
