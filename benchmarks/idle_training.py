"""What replicas do with their idle time: shares with and without drafter training, and what it delayed.

    python benchmarks/idle_training.py OUT [--steps 24] [overrides ...]

Makes the same run twice, on two CPU replicas with the built-in policy and its eagle head: `online.when=never`
and `always`. Both sample the same tokens. The delay is counted, not compared: seconds that messages to a
replica waited for its training to stop, and those that the run spent on publishing, in per cent of all steps.
On a busy machine both are upper bounds.
"""

import argparse
import json
from pathlib import Path

from paceline.config import load_config
from paceline.loop import train

WORKLOAD = [
    "run.device=cpu",
    "run.threads=1",
    "eval.every=0",
    "eval.problems=4",
    "report.closing_pairs=0",
    "checkpoint.every=1000",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.speculation.drafters=[eagle]",
    "rollout.speculation.pacing=fixed",
    "rollout.speculation.tokens=5",
    "cluster.replicas=2",
]


def main() -> None:
    """Makes both runs and prints one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    print(
        "| `online.when` | idle share | unused share | tokens taught | accept length | delay | longest stop |"
    )
    print("|---|---|---|---|---|---|---|")
    for when in ("never", "always"):
        own = [f"run.root={arguments.out}", f"run.name={when}", f"run.steps={arguments.steps}"]
        own.append(f"rollout.speculation.online.when={when}")
        run = train(load_config(None, [*WORKLOAD, *own, *arguments.overrides])).summary.run
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        print(_row(when, [record for record in records if record["kind"] == "train"]))


def _row(when: str, steps: list[dict]) -> str:
    def total(key: str) -> float:
        return sum(step.get(key, 0.0) for step in steps)

    rollouts = total("time/rollout")
    idle, unused = (
        sum(step[key] * step["time/rollout"] for step in steps) / rollouts
        for key in ("time/idle_share", "time/unused_share")
    )
    delay = total("time/drafter_displaced") / total("time/step")
    longest = max(step.get("time/drafter_stop", 0.0) for step in steps)
    accepted = total("speculation/eagle/accept_length") / len(steps)
    return (
        f"| `{when}` | {idle:.1%} | {unused:.1%} | {total('drafter/tokens'):,.0f} | {accepted:.2f} | "
        f"{delay:.2%} | {1000 * longest:.1f} ms |"
    )


if __name__ == "__main__":
    main()
