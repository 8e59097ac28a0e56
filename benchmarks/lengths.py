"""Shows how long the responses of `paceline rollout --save` are, and how much of a step is its tail.

    python benchmarks/lengths.py FOLDER

Bars double in width from one to the next, so a log-normal distribution looks like a bell. The tail is the
share of plain decoding's steps in which at most an eighth of a step's requests still run.
"""

import json
import math
import statistics
import sys
from pathlib import Path

# A decode step belongs to the tail when at most this share of the requests still run.
TAIL_SHARE = 1 / 8
BAR_CHARACTERS = 40


def read_steps(folder: Path) -> list[list[int]]:
    steps = []
    for path in sorted(folder.glob("step_*.jsonl")):
        groups = [json.loads(line) for line in path.read_text().splitlines()]
        steps.append([len(sample["tokens"]) for group in groups for sample in group["samples"]])
    if not steps:
        raise SystemExit(f"{folder} holds no step_*.jsonl; write it with `paceline rollout --save {folder}`")
    return steps


def tail_of(lengths: list[int]) -> float:
    """Returns the share of decode steps after the point where an eighth of the requests is left."""
    running_at_most = sorted(lengths, reverse=True)[int(TAIL_SHARE * len(lengths))]
    return 1 - running_at_most / max(lengths)


def shape_of(lengths: list[int]) -> tuple[float, float]:
    """Returns the standard deviation and the skew of the logarithms; a log-normal has a skew of 0."""
    logs = [math.log(length) for length in lengths]
    mean = statistics.fmean(logs)
    deviation = statistics.pstdev(logs)
    return deviation, statistics.fmean(((x - mean) / deviation) ** 3 for x in logs)


def describe(steps: list[list[int]]) -> str:
    lengths = sorted(length for step in steps for length in step)
    deviation, skew = shape_of(lengths)
    quantiles = ", ".join(f"p{100 * q:g} {lengths[int(q * len(lengths))]}" for q in (0.1, 0.5, 0.9, 0.99))
    lines = [
        f"{len(lengths)} responses in {len(steps)} steps: mean {statistics.fmean(lengths):.0f}, {quantiles}, "
        f"max {lengths[-1]}",
        f"logarithms: standard deviation {deviation:.2f}, skew {skew:+.2f} (log-normal: 0)",
        f"tail: {100 * statistics.fmean(tail_of(step) for step in steps):.0f}% of decode steps with at most "
        f"an eighth of the requests running",
    ]
    counts = [0] * (int(math.log2(lengths[-1])) + 1)
    for length in lengths:
        counts[int(math.log2(length))] += 1
    for power, count in enumerate(counts):
        if any(counts[: power + 1]):
            bar = "#" * round(BAR_CHARACTERS * count / max(counts))
            lines.append(f"{2**power:>6} -{2 ** (power + 1) - 1:>6} {100 * count / len(lengths):5.1f}% {bar}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(describe(read_steps(Path(sys.argv[1]))))
