"""What runs with native and with vLLM's rollouts learned and cost, as a Markdown table.

python benchmarks/vllm_table.py RUNS        the folder of `vllm_learns.sh` or `vllm_steps.sh`
"""

import json
import statistics
import sys
from pathlib import Path

STAGES = ("time/step", "time/rollout", "time/learn", "time/sync")


def row(run: Path) -> str:
    """Returns a run's line: accuracies at its ends, medians of its stages, how far logprobs differ."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evals = [record for record in records if record["kind"] == "eval"]
    steps = [record for record in records if record["kind"] == "train"]
    ends = " -> ".join(f"{record['eval/accuracy']:.3f}" for record in (evals[0], evals[-1])) if evals else "-"
    low, high = (evals[-1][f"eval/accuracy_{end}"] for end in ("low", "high")) if evals else (0.0, 0.0)
    seconds = " | ".join(f"{statistics.median(s[stage] for s in steps):.2f}" for stage in STAGES)
    kl = statistics.mean(record["mismatch/kl"] for record in steps)
    return f"| {run.name} | {ends} | {low:.3f} to {high:.3f} | {seconds} | {kl:.1e} |"


def main(folder: Path) -> None:
    """Prints the table."""
    print("| run | held-out accuracy | 95% interval | step s | rollout s | learn s | sync s | mismatch KL |")
    print("|---|---|---|---|---|---|---|---|")
    for run in sorted(folder.iterdir()):
        if (run / "metrics.jsonl").is_file():
            print(row(run))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
