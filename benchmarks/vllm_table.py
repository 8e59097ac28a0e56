"""What runs with native and with vLLM's rollouts learned and cost, as a Markdown table.

python benchmarks/vllm_table.py RUNS        the folder of `vllm_learns.sh` or `vllm_steps.sh`

Times are medians over the steps after the first, which compiles and captures.
"""

import json
import statistics
import sys
from pathlib import Path

STAGES = ("time/step", "time/rollout", "time/learn", "time/sync")
HEADINGS = (
    "run",
    "steps",
    "held-out accuracy",
    "95% interval",
    "step s",
    "rollout s",
    "learn s",
    "sync s",
    "accept length",
    "response tokens/s",
    "response tokens",
    "mismatch KL",
)


def row(run: Path) -> str:
    """Returns a run's line: accuracies at its ends, medians of its steps, how far logprobs differ."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evals = [record for record in records if record["kind"] == "eval"]
    steps = [record for record in records if record["kind"] == "train"]
    if not steps:
        return f"| {run.name} | 0 |" + " - |" * (len(HEADINGS) - 2)
    ends = " -> ".join(f"{record['eval/accuracy']:.3f}" for record in (evals[0], evals[-1])) if evals else "-"
    low, high = (evals[-1][f"eval/accuracy_{end}"] for end in ("low", "high")) if evals else (0.0, 0.0)
    warm = steps[1:] or steps

    def median(key: str, digits: int) -> str:
        values = [step[key] for step in warm if step.get(key) is not None]
        return f"{statistics.median(values):,.{digits}f}" if values else "-"

    cells = [run.name, str(len(steps)), ends, f"{low:.3f} to {high:.3f}"]
    cells += [median(stage, 2) for stage in STAGES]
    cells += [median("speculation/accept_length", 2)]
    cells += [median("time/tokens_per_second", 0), median("rollout/tokens", 0)]
    cells += [f"{statistics.mean(record['mismatch/kl'] for record in steps):.1e}"]
    return "| " + " | ".join(cells) + " |"


def main(folder: Path) -> None:
    print("| " + " | ".join(HEADINGS) + " |")
    print("|---" * len(HEADINGS) + "|")
    for run in sorted(folder.iterdir()):
        if (run / "metrics.jsonl").is_file():
            print(row(run))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
