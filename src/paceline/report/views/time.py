"""Where does the time go? Stages of a step, parts of a rollout, speed and memory."""

from collections.abc import Sequence

import numpy as np

from paceline.plots.chart import Axis, Chart
from paceline.report.run_data import RunData
from paceline.report.views.curves import Curves, stacked_chart

SECONDS = Axis("time", "s", low=0.0)

# Runs whose stages are drawn; a page with more of them compares the steps' times alone.
MOST_STACKS = 4

# What a step consists of, in its order; the first three are parts of the rollout.
PARTS = (
    "prefill",
    "decode",
    "tail",
    "waiting for rewards",
    "rest of the rollout",
    "learning",
    "drafter",
    "sync",
)

CURVES = (
    Curves(
        "step-seconds",
        "Time of a step",
        {"time/step": "step"},
        SECONDS,
        "Without evaluations and checkpoints.",
    ),
    Curves(
        "speed",
        "Speed of the rollout",
        {"time/tokens_per_second": "response tokens"},
        Axis("speed", "tokens/s", low=0.0),
        "Response tokens over all seconds of the rollout, rewards included.",
    ),
    Curves(
        "tail-share",
        "Decode steps in the tail",
        {"rollout/tail_steps": "with at most an eighth of the samples running"},
        Axis("share of decode steps", "%", low=0.0, high=100.0),
        scale=100.0,
    ),
)


# The parts of a step that are not the rollout's.
AFTER_ROLLOUT = ("learning", "drafter", "sync")


def stage_seconds(run: RunData) -> dict[str, np.ndarray]:
    """Returns the seconds of every part of a step, by step."""
    train = run.train
    parts = {
        "timing steps": train["time/timing"],
        "prefill": train["time/prefill"],
        "decode": train["time/decode"],
        "tail": train["time/tail"],
        "waiting for rewards": train["time/reward_wait"],
    }
    known = sum(np.nan_to_num(part) for part in parts.values())
    rest = np.clip(np.nan_to_num(train["time/rollout"]) - known, 0.0, None)
    stages = {
        "rest of the rollout": rest,
        "learning": train["time/learn"],
        "drafter": train["time/drafter"],
        "sync": train["time/sync"],
    }
    return {name: np.nan_to_num(column) for name, column in (parts | stages).items()}


def time_charts(runs: Sequence[RunData], limit: int) -> list[Chart]:
    """Returns the charts of this view for one or more runs."""
    note = (
        "Prefill, decode and tail are the rollout; the tail is what passes while at most an eighth of the "
        "samples still run."
    )
    stacks = [
        stacked_chart(
            f"stages-{number}",
            "Stages of a step" if len(runs) == 1 else f"Stages of a step: {run.label}",
            run,
            stage_seconds(run),
            SECONDS,
            limit // 2,
            note,
        )
        for number, run in enumerate(runs[:MOST_STACKS])
    ]
    charts = [*stacks, *(curve.chart(runs, limit) for curve in CURVES)]
    return [chart for chart in charts if chart is not None]


def memory_charts(runs: Sequence[RunData], limit: int) -> list[Chart]:
    """Returns peak memory by stage."""
    stages = ("rollout", "learn", "drafter", "sync")
    names = {f"memory/{stage}_gb": stage for stage in stages} | {"memory/graph_pool_gb": "captured graphs"}
    curves = (
        Curves(
            "memory",
            "Peak memory by stage",
            names,
            Axis("memory", "GB", low=0.0),
            "On a GPU each stage's own peak; on a CPU the process's high-water mark, which never falls.",
        ),
        Curves(
            "micro-batch",
            "Tokens per micro-batch",
            {"memory/micro_batch_tokens": "micro-batch"},
            Axis("micro-batch", "tokens", low=0.0),
            "Halved where memory ran out.",
        ),
    )
    charts = [curve.chart(runs, limit) for curve in curves]
    return [chart for chart in charts if chart is not None]
