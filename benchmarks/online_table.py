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
    """One line for each run, up to the step that all runs of the same begin have made.

    `share` is what the head's learning added to the steps, by its own count; `stage` is all that happens
    between the policy's update and the new weights.
    """
    runs = {run.name: steps_of(run) for run in sorted(folder.iterdir()) if (run / "metrics.jsonl").is_file()}
    print(f"{'run':<32}{'steps':>6}{'first':>7}{'middle':>7}{'last':>7}{'share':>8}{'stage':>8}", end="")
    print(f"{'s/rollout':>10}{'s/step':>8}{'updates':>8}{'taken back':>11}")
    for name, steps in runs.items():
        begin = name.rpartition("-")[0]
        count = min(len(other) for known, other in runs.items() if known.rpartition("-")[0] == begin)
        if count < 3:
            print(f"{name:<32}{len(steps):>6}")
            continue
        show_run(name, len(steps), steps[:count])


def show_run(name: str, made: int, steps: list[dict]) -> None:
    lengths = [step.get("speculation/eagle/accept_length", float("nan")) for step in steps]
    parts = (lengths[:2], lengths[len(lengths) // 2 - 1 : len(lengths) // 2 + 1], lengths[-2:])
    shown = "".join(f"{statistics.mean(part):>7.2f}" for part in parts)
    whole = sum(step["time/step"] for step in steps)
    shares = ""
    for key in ("time/drafter_displaced", "time/drafter"):
        own = sum(step.get(key, 0.0) for step in steps)
        shares += f"{own / max(1e-9, whole - own):>8.2%}"
    # The first two steps capture graphs.
    rollout, step = (
        statistics.mean(step[key] for step in steps[2:]) for key in ("time/rollout", "time/step")
    )
    updates = sum(step.get("drafter/updates", 0.0) for step in steps)
    back = steps[-1].get("drafter/rollbacks", 0.0)
    print(f"{name:<32}{made:>6}{shown}{shares}{rollout:>10.3f}{step:>8.3f}{updates:>8.0f}{back:>11.0f}")


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
