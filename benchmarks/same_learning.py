"""Shows what each run of `countdown.sh rl` learned, and whether plain and paced runs of a seed are the same.

    python benchmarks/same_learning.py RUNS

Everything in the metrics but times, memory and what speculation did must be equal, step by step.
"""

import json
import sys
from pathlib import Path

# Metrics that depend on how tokens came about and not on which tokens they are.
ABOUT_SPEED = ("time/", "memory/", "speculation/", "drafter/", "rollout/decode_steps", "rollout/tail_steps")
SHOWN = ("rollout/accuracy", "rollout/length_mean", "rollout/length_max", "time/rollout", "time/learn")


def read_metrics(run: Path) -> list[dict]:
    """Returns the records of a run in order; a line that was being written is left out."""
    records = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def differences(plain: list[dict], other: list[dict]) -> list[str]:
    """Returns `step: key` of everything that differs and should not, over the steps that both have."""
    found = []
    for left, right in zip(plain, other, strict=False):
        for key in left.keys() | right.keys():
            if not key.startswith(ABOUT_SPEED) and left.get(key) != right.get(key):
                found.append(f"{left['kind']} {left['step']}: {key} {left.get(key)} -> {right.get(key)}")
    return found


def show(run: Path, records: list[dict]) -> None:
    """Prints a run's evaluations, and its steps in one line each."""
    evals = [r for r in records if r["kind"] == "eval"]
    print(run.name, *(f"step {r['step']}: {100 * r['eval/accuracy']:.1f}%" for r in evals), sep="  ")
    steps = [r for r in records if r["kind"] == "train"]
    for key in SHOWN:
        print(f"  {key:<20}", *(f"{r[key]:8.3g}" for r in steps))


def main() -> None:
    """Prints all runs, and exits with 1 where a pair differs."""
    runs = Path(sys.argv[1])
    failed = False
    for plain in sorted(runs.glob("plain-*")):
        records = read_metrics(plain)
        show(plain, records)
        paced = runs / plain.name.replace("plain", "paced")
        if paced.is_dir():
            others = read_metrics(paced)
            show(paced, others)
            different = differences(records, others)
            failed |= bool(different)
            compared = min(len(records), len(others))
            print(
                f"  {compared} records compared, {len(different)} values differ", *different[:5], sep="\n    "
            )
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
