"""Tables of runs whose head learned, for online_gpu.sh and byproduct.sh.

python benchmarks/online_table.py runs FOLDER
python benchmarks/online_table.py identical RUN RUN
python benchmarks/online_table.py learned RUN BATCH     tokens, responses, steps of as many tokens
"""

import json
import statistics
import sys
from pathlib import Path

# Metrics that may differ between runs whose policies are the same.
DRAFTERS_OWN = ("time/", "memory/", "drafter/", "speculation/", "rollout/decode_steps", "rollout/tail_steps")


def steps_of(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


def show_runs(folder: Path) -> None:
    """Accept length by step, learning time by kind, and what it came to of a step.

    `added` is what the drafter counts itself, copies for it in the learner's time included; `stage` is all
    that happens between the policy's update and the new weights, saving included.
    """
    columns = f"{'s/step':>8}{'added':>8}{'stage':>8}{'idle':>8}{'updates':>9}"
    print(f"{'run':<34}{'steps':>6}  {'accept length at steps 1, 6, 11 ..':<56}{columns}")
    for run in sorted(path for path in folder.iterdir() if (path / "metrics.jsonl").is_file()):
        steps = steps_of(run)
        if not steps:
            print(f"{run.name:<34}{0:>6}")
            continue
        lengths = [step.get("speculation/eagle/accept_length", float("nan")) for step in steps]
        shown = " ".join(f"{value:5.2f}" for value in [*lengths[::5], lengths[-1]])
        seconds = statistics.median(step["time/step"] for step in steps[1:] or steps)
        added = sum(step.get("time/drafter_displaced", 0.0) for step in steps)
        idle = sum(step.get("time/drafter_idle", 0.0) for step in steps)
        stage = sum(step.get("time/drafter", 0.0) for step in steps)
        whole = sum(step["time/step"] for step in steps)
        shares = f"{added / max(1e-9, whole - added):>8.2%}{stage / max(1e-9, whole - stage):>8.2%}"
        updates = sum(step.get("drafter/updates", 0.0) for step in steps)
        print(
            f"{run.name:<34}{len(steps):>6}  {shown:<56}{seconds:>8.2f}{shares}{idle:>7.1f}s{updates:>9.0f}"
        )
    _show_gap(folder)


def _show_gap(folder: Path) -> None:
    """How much of the gap between a general and an in-domain head `auto` has closed."""
    for task in ("countdown", "sums"):
        runs = [folder / f"{task}-{name}" for name in ("general-never", "own-never", "general-auto")]
        if not all((run / "metrics.jsonl").is_file() for run in runs):
            continue
        ends = [steps_of(run)[-5:] for run in runs]
        frozen, own, learned = (
            statistics.mean(step["speculation/eagle/accept_length"] for step in end) for end in ends
        )
        gap = own - frozen
        closed = (learned - frozen) / gap if gap > 0 else float("nan")
        starts = f"frozen general {frozen:.2f}, in-domain {own:.2f}"
        print(f"{task}: {starts}, auto {learned:.2f}: {closed:.0%} of the gap closed")


def show_identical(first: Path, second: Path) -> int:
    """Whether two runs differ in nothing but their drafts."""
    differences = []
    for before, after in zip(steps_of(first), steps_of(second), strict=True):
        for key, value in before.items():
            if not key.startswith(DRAFTERS_OWN) and after.get(key) != value:
                differences.append(f"step {before['step']}: {key} {value} against {after.get(key)}")
    files = ("policy/model.safetensors", "optimiser.safetensors")
    newest = [sorted((run / "checkpoints").glob("step_*"))[-1] for run in (first, second)]
    for file in files:
        if (newest[0] / file).read_bytes() != (newest[1] / file).read_bytes():
            differences.append(f"{file} differs")
    print("\n".join(differences) or "identical: metrics, weights, moments")
    return int(bool(differences))


def show_learned(run: Path, batch: int) -> None:
    """What a run's head learned from, and steps of `batch` responses with as many tokens."""
    steps = steps_of(run)
    tokens, written, responses = (
        sum(step.get(name, 0.0) for step in steps)
        for name in ("drafter/tokens", "rollout/tokens", "rollout/samples")
    )
    print(round(tokens), round(responses), max(1, round(tokens * responses / (batch * written))))


def main() -> int:
    match sys.argv[1:]:
        case "identical", first, second:
            return show_identical(Path(first), Path(second))
        case "learned", run, batch:
            show_learned(Path(run), int(batch))
        case "runs", folder:
            show_runs(Path(folder))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
