"""Several runs side by side: the same seeds? the same samples? and how many times as fast, stage by stage."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.plots.document import table
from paceline.report.run_data import RunData

# Stages whose speed is compared.
STAGES = {
    "time/step": "step",
    "time/rollout": "rollout",
    "time/decode": "decode",
    "time/tail": "tail",
    "time/learn": "learning",
}

# Metrics that are the same in two runs exactly where their samples are.
SAMPLED = ("reward/mean", "rollout/tokens", "rollout/length_max", "rollout/accuracy")

# Settings that may differ between runs without making them another experiment.
UNIMPORTANT = ("run.name", "run.root", "run.threads", "checkpoint.", "report.", "eval.")

# Differences of recipes that are listed.
MOST_DIFFERENCES = 20


def comparison(runs: Sequence[RunData]) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns sentences about what the runs share, and tables that compare them with the first."""
    first, *others = runs
    words = [_seeds(runs), *(_same_samples(first, other) for other in others)]
    return words, [_outcomes(runs), _speedups(first, others), *_differences(runs)]


def _seeds(runs: Sequence[RunData]) -> str:
    seeds = {run.settings.get("run.seed") for run in runs}
    if seeds == {None}:
        return "The runs' recipes cannot be read, so their seeds are not known."
    if len(seeds) == 1:
        return f"All runs have the same seed ({seeds.pop()})."
    listing = ", ".join(f"{run.name}: {run.settings.get('run.seed')}" for run in runs)
    return f"The seeds differ ({listing}): the runs' samples cannot be compared one by one."


def _common(first: RunData, other: RunData) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the steps that both runs have, and their places in each."""
    return np.intersect1d(first.train.xs(), other.train.xs(), return_indices=True)


def _same_samples(first: RunData, other: RunData) -> str:
    """Returns up to which step two runs sampled the same, as far as their metrics show."""
    steps, here, there = _common(first, other)
    if not len(steps):
        return f"{other.name} has no step in common with {first.name}."
    same = 0
    while same < len(steps) and all(
        np.array_equal(first.train[name][here[same]], other.train[name][there[same]], equal_nan=True)
        for name in SAMPLED
    ):
        same += 1
    if same == len(steps):
        return f"{other.name} sampled the same as {first.name} in all {len(steps)} common steps."
    since = f"up to step {steps[same - 1]:.0f}" if same else "in no step"
    return (
        f"{other.name} sampled the same as {first.name} {since}; from then on times compare different work."
    )


def _outcomes(runs: Sequence[RunData]) -> dict[str, Any]:
    graded = any(run.graded for run in runs)
    rows = []
    for run in runs:
        reward = run.train.known("reward/mean")
        lengths = run.train.known("speculation/accept_length")
        rows.append(
            [
                run.name,
                f"{run.train.steps[-1] if len(run.train) else 0}",
                _last_evaluation(run, "eval/accuracy", 100, "%", 1),
                *([_last_evaluation(run, "eval/reward", 1, "", 3)] if graded else []),
                f"{reward[-1]:.3g}" if len(reward) else "-",
                f"{lengths.mean():.2f}" if len(lengths) else "-",
            ]
        )
    held_out = ["held-out accuracy, last", *(["held-out reward, last"] if graded else [])]
    columns = ["run", "steps", *held_out, "reward, last", "accept length, mean"]
    return table("outcomes", "What the runs reached", columns, rows)


def _last_evaluation(run: RunData, name: str, scale: float, unit: str, digits: int) -> str:
    """Returns a metric's value in the last evaluation that has it, with its interval."""
    if not run.evals.has(name):
        return "-"
    last = np.flatnonzero(np.isfinite(run.evals[name]))[-1]
    low, high = (scale * end[last] for end in run.evals.interval(name))
    return f"{scale * run.evals[name][last]:.{digits}f}{unit} [{low:.{digits}f}, {high:.{digits}f}]"


def _speedups(first: RunData, others: Sequence[RunData]) -> dict[str, Any]:
    """Returns, by stage, the median over common steps of the first run's time over the other's."""
    rows = []
    for metric, stage in STAGES.items():
        if not first.train.has(metric):
            continue
        cells = [stage, f"{np.nanmedian(first.train[metric]):.3g} s"]
        for other in others:
            ratio = _ratio(first, other, metric)
            cells.append("-" if ratio is None else f"{ratio[0]:.2f}x [{ratio[1]:.2f}, {ratio[2]:.2f}]")
        rows.append(cells)
    columns = ["stage", f"{first.name}, median", *(other.name for other in others)]
    note = (
        f"Times as fast as {first.name}: median over the common steps of the ratio of times, with its "
        "quartiles. Only where the samples are the same is this the speed of the same work."
    )
    return table("speedups", "Speed-up by stage", columns, rows, note)


def _ratio(first: RunData, other: RunData, metric: str) -> tuple[float, float, float] | None:
    _, here, there = _common(first, other)
    times = other.train[metric][there]
    ratios = first.train[metric][here] / np.where(times > 0, times, np.nan)
    ratios = ratios[np.isfinite(ratios)]
    if not len(ratios):
        return None
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    return float(middle), float(low), float(high)


def _differences(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    keys = sorted({key for run in runs for key in run.settings if not key.startswith(UNIMPORTANT)})
    differing = [key for key in keys if len({repr(run.settings.get(key)) for run in runs}) > 1]
    if not differing:
        return []
    rows = [
        [key, *(str(run.settings.get(key, "-"))[:200] for run in runs)]
        for key in differing[:MOST_DIFFERENCES]
    ]
    columns = ["key", *(run.name for run in runs)]
    return [table("differences", "Recipes differ in", columns, rows, text=tuple(range(1, len(runs) + 1)))]
