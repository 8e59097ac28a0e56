"""Trains from Python, reads the run's metrics, and looks at what the trained policy writes.

python examples/train_in_python.py
python examples/train_in_python.py run.steps=25 run.seed=1      # overrides, as on the command line
"""

import json
import sys

import paceline

OVERRIDES = ["run.steps=5", "eval.problems=128"]


def main() -> None:
    """Runs a short training of the built-in policy and prints what came of it."""
    config = paceline.load_config("default", [*OVERRIDES, *sys.argv[1:]])
    result = paceline.train(config, quiet=False)
    summary = result.summary
    print(f"held-out accuracy: {summary.before.accuracy_text} -> {summary.after.accuracy_text}")

    with (summary.run / "metrics.jsonl").open() as lines:
        records = [json.loads(line) for line in lines]
    for record in records:
        if record["kind"] == "train":
            reward = record["reward/mean"]
            loss = record["policy/loss"]
            print(f"step {record['step']}: reward {reward:.3f}, loss {loss:+.4f}")

    policy = paceline.load(summary.run / "checkpoints" / "best")
    for text in policy.generate(["a9b8c8="], samples=4, seed=7)[0]:
        print(text)


if __name__ == "__main__":
    main()
