"""`python -m tests.soak --seconds 600 --seed 0`: as many cases as fit; `--case N` plays one again."""

import argparse
import gc
import itertools
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from tests.loop_helpers import make_tiny_policy
from tests.soak.case import VARIANTS, Case, Reference, SoakFailure, draw_variant, make_reference


def soak(
    seconds: float,
    seed: int,
    root: Path,
    most: int | None = None,
    workers: int = 1,
    say: Callable[[str], None] = print,
) -> int:
    """Plays cases for so many seconds, or `most` of them; returns how many. Raises `SoakFailure`.

    Case n has the seed `seed` + n, whichever of the worker processes plays it.
    """
    torch.set_num_threads(1)
    start = time.monotonic()
    policy = make_tiny_policy(root / "policy", layers=3)  # as many as an eagle head looks at
    wanted = VARIANTS if most is None else {draw_variant(random.Random(seed + n)) for n in range(most)}
    references = {name: make_reference(policy, root / "reference" / name, name) for name in wanted}
    deadline = start + seconds
    files = []
    children = []
    for worker in range(workers):
        seeds = itertools.islice(itertools.count(seed), worker, most, workers)
        files.append(root / f"worker-{worker}.jsonl")
        children.append(_fork(lambda: play_all(seeds, deadline, policy, references, root, files[-1])))
    for child in children:
        os.waitpid(child, 0)
    played = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    failures = [case["failure"] for case in played if case["failure"]]
    if failures:
        raise SoakFailure("\n\n".join(failures))
    kinds = Counter(event.split(":")[0] for case in played for event in case["events"])
    happened = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    refused = sum(case["refused"] for case in played)
    say(
        f"soak: {len(played)} cases from seed {seed} in {time.monotonic() - start:.0f} s ({happened}); "
        f"{len(played) - refused} ended in the same weights, {refused} in a clear refusal"
    )
    return len(played)


def play_all(
    seeds: Iterable[int],
    deadline: float,
    policy: Path,
    references: dict[str, Reference],
    root: Path,
    results: Path,
) -> None:
    """Plays cases until the deadline or the first failure, and writes down a line for each."""
    results.touch()
    for seed in seeds:
        if time.monotonic() > deadline:
            return
        case = Case(seed, policy, references, root / f"case-{seed}")
        failure = ""
        try:
            case.play()
            case.clean()
        except Exception as error:
            what = error if isinstance(error, SoakFailure) else traceback.format_exc()
            failure = (
                f"case {seed} ({case.variant}: {' | '.join(case.outcome.events)}): {what}\n"
                f"its files are in {case.root}; again with: python -m tests.soak --case {seed}"
            )
        record = {"events": case.outcome.events, "refused": case.outcome.refused, "failure": failure}
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if failure:
            return


def _fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            gc.freeze()  # as in `forked.py`
            work()
        finally:
            os._exit(0)
    return child


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--workers", type=int, default=2, help="cases at a time")
    parser.add_argument("--case", type=int, help="play only the case with this seed")
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="paceline-soak-"))
    try:
        if given.case is not None:
            soak(600.0, given.case, root, most=1)
        else:
            soak(given.seconds, given.seed, root, workers=given.workers)
    except SoakFailure as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
