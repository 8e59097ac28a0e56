"""`python -m tests.soak --seconds 600 --seed 0`: as many cases as fit; `--case N` plays one again."""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from tests.loop_helpers import make_tiny_policy
from tests.soak.case import VARIANTS, Case, Reference, SoakFailure, make_reference


def soak(seconds: float, seed: int, root: Path, most: int = 0, say=print) -> int:
    """Plays cases for so many seconds, or `most` of them; returns how many. Raises `SoakFailure`."""
    torch.set_num_threads(1)
    start = time.monotonic()
    policy = make_tiny_policy(root / "policy")
    references = {name: make_reference(policy, root / "reference" / name, name) for name in VARIANTS}
    events: Counter[str] = Counter()
    refused = count = 0
    while (time.monotonic() - start < seconds) and (not most or count < most):
        case_seed = seed + count
        events_of_case, was_refused = play(case_seed, policy, references, root)
        events.update(event.split(":")[0] for event in events_of_case)
        refused += was_refused
        count += 1
        if count % 50 == 0:
            say(f"{count} cases in {time.monotonic() - start:.0f} s")
    happened = ", ".join(f"{number} {event}" for event, number in sorted(events.items()))
    say(
        f"soak: {count} cases in {time.monotonic() - start:.0f} s, seeds {seed} to {seed + count - 1} "
        f"({happened}); {count - refused} ended in the same weights, {refused} in a clear refusal"
    )
    return count


def play(seed: int, policy: Path, references: dict[str, Reference], root: Path) -> tuple[list[str], bool]:
    """Plays one case and removes its files; where it fails they stay, and the message says where."""
    case = Case(seed, policy, references, root / f"case-{seed}")
    try:
        outcome = case.play()
    except (SoakFailure, TimeoutError, OSError) as error:
        raise SoakFailure(
            f"case {seed} ({case.variant}: {' | '.join(case.outcome.events)}): {error}\n"
            f"its files are in {case.root}; again with: python -m tests.soak --case {seed}"
        ) from error
    case.clean()
    return outcome.events, outcome.refused


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--case", type=int, help="play only the case with this seed")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="paceline-soak-"))
    try:
        if arguments.case is not None:
            soak(600.0, arguments.case, root, most=1)
        else:
            soak(arguments.seconds, arguments.seed, root)
    except SoakFailure as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
