"""The charts of runs: in each section the few that answer its question; every other metric to unfold."""

import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from paceline.plots.chart import Axis, Chart, Mark
from paceline.plots.document import Section
from paceline.report.run_data import RunData
from paceline.report.views.curves import Curves, stacked_chart

CORRECT = Axis("correct", "%", low=0.0, high=100.0)
SECONDS = Axis("time", "s", low=0.0)

# The note on the other metrics, and how many of them and of their points a page carries.
MORE = "Under the names of metrics.jsonl, which docs/metrics.md explains; what never changed is left out."
MOST_OTHERS = 200
MORE_POINTS = 300

# Positions of a draft that are drawn, and steps that are marked.
MOST_POSITIONS = 9
MOST_MARKS = 40

POSITION = re.compile(r"speculation/(.+)/accepted_(\d+)")

GRADED = Curves(
    "reward-held-out",
    "Reward on held-out problems",
    {"eval/reward": "mean reward"},
    Axis("reward"),
    "What the task grades; the band is the 95% interval over problems.",
    evals=True,
)
# Of supervised fine-tuning.
LOSSES = (
    Curves("loss-held-out", "Held-out loss", {"eval/loss": "loss"}, Axis("loss", "nats"), evals=True),
    Curves("loss", "Loss", {"sft/loss": "loss"}, Axis("loss", "nats"), "Of each step's examples."),
)
LEARNING = (
    Curves(
        "accuracy-held-out",
        "Accuracy on held-out problems",
        {"eval/accuracy": "avg@n"},
        CORRECT,
        "The same problems and seeds at every evaluation; the band is the 95% interval over problems.",
        scale=100.0,
        evals=True,
    ),
    Curves(
        "reward",
        "Reward",
        {"reward/mean": "mean reward"},
        Axis("reward"),
        "Mean over the step's samples: what the learner maximises.",
    ),
    Curves(
        "lengths",
        "Response lengths",
        {
            "rollout/length_mean": "mean",
            "rollout/length_p95": "95th percentile",
            "rollout/length_max": "longest",
        },
        Axis("response length", "tokens", low=0.0),
        "The distance between mean and longest is the long tail that a rollout waits for.",
    ),
    Curves(
        "entropy",
        "Entropy of the policy",
        {"policy/entropy": "entropy"},
        Axis("entropy", "nats per token", low=0.0),
        "It falls as the policy becomes sure; near 0 it no longer explores.",
    ),
)

STEP_SECONDS = Curves(
    "step-seconds",
    "Time of a step",
    {"time/step": "step"},
    SECONDS,
    "Without evaluations and checkpoints.",
)

SPEED = Curves(
    "speed",
    "Speed of the rollout",
    {"time/tokens_per_second": "response tokens"},
    Axis("speed", "tokens/s", low=0.0),
    "Response tokens over all seconds of the rollout, rewards included.",
)

SPECULATING = Curves(
    "speculating",
    "How often the engine speculates",
    {"speculation/steps": "decode steps that speculated", "speculation/accepted": "proposed tokens accepted"},
    Axis("share", "%", low=0.0, high=100.0),
    "The pacer speculates where it expects to be faster, and decodes plainly elsewhere.",
    scale=100.0,
)

MISMATCH = Curves(
    "mismatch",
    "Mismatch between rollout and learner",
    {"mismatch/k3": "KL, k3 estimate", "mismatch/kl": "KL, plain estimate"},
    Axis("KL", "nats per token"),
    "The same tokens scored by the engine that sampled them and by the learner, before the weights move.",
)

INCIDENTS = Curves(
    "incidents",
    "What went wrong",
    {
        "reward/failures": "samples whose reward or tool failed",
        "rollout/refused": "requests refused by the engine",
        "rollout/fell_back": "rollouts in base precision (1: yes)",
        "policy/skipped": "update skipped (1: yes)",
        "policy/failed_steps": "failed steps in a row",
    },
    Axis("count", low=0.0, high=1.0),
    hide_zero=True,
)

# The parts of a step that are not the rollout's, by their metrics.
AFTER_ROLLOUT = {"learning": "time/learn", "drafter": "time/drafter", "sync": "time/sync"}

ROLLOUT = {
    "timing steps": "time/timing",
    "prefill": "time/prefill",
    "decode": "time/decode",
    "tail": "time/tail",
    "waiting for rewards": "time/reward_wait",
}


def sections(runs: Sequence[RunData], limit: int) -> list[dict[str, Any]]:
    """Returns the sections that have a chart, with at most `limit` points a curve."""
    shown: set[str] = set()

    def drawn(*curves: Curves, marks: Sequence[Mark] = ()) -> list[Chart]:
        shown.update(name for curve in curves for name in curve.metrics)
        charts = [curve.chart(runs, limit, marks) for curve in curves]
        return [chart for chart in charts if chart is not None]

    graded = (GRADED,) if any(run.graded for run in runs) else ()
    one = runs[0] if len(runs) == 1 else None
    names = drafters(one) if one else []
    positions = [_by_position(one, name) for name in names] if one else []
    marks = head_marks(one) if one else []
    stages = _stages(one, limit // 2) if one else None
    if stages:
        shown.update(("time/step", "time/rollout", *ROLLOUT.values(), *AFTER_ROLLOUT.values()))
    found = [
        Section("learning", "Does the policy learn?", "Learning", charts=drawn(*graded, *LOSSES, *LEARNING)),
        Section(
            "time",
            "Where does the time go?",
            "Time",
            charts=[stages, *drawn(SPEED)] if stages else drawn(STEP_SECONDS, SPEED),
        ),
        Section(
            "speculation",
            "What did speculation give?",
            "Speculation",
            "A drafter proposes several tokens and the policy checks them in one pass. What is sampled "
            "does not change; how many passes it takes does."
            + (" Dashed lines: a new head was published." if marks else ""),
            drawn(_accept_length(names), SPECULATING, marks=marks),
            more=drawn(*positions, marks=marks),
        ),
        Section("health", "Can the samples be trusted?", "Mismatch", charts=drawn(MISMATCH, INCIDENTS)),
    ]
    more = [chart for curve in _others(runs, shown) if (chart := curve.chart(runs, MORE_POINTS)) is not None]
    found.append(Section("metrics", "Every other metric", "Metrics", MORE, more=more))
    return [section.record() for section in found if section.charts or section.more]


def _others(runs: Sequence[RunData], shown: Collection[str]) -> list[Curves]:
    """Returns a chart of each metric that no other chart shows, unless it is always the same."""
    others = []
    for evals in (False, True):
        columns = [run.evals if evals else run.train for run in runs]
        for name in sorted({name for each in columns for name in each.names} - set(shown)):
            values = np.concatenate([each.known(name) for each in columns])
            if not name.endswith(("_margin", "_low", "_high")) and len(values) and np.ptp(values):
                others.append(Curves(f"metric-{name}", name, {name: name}, Axis("value"), evals=evals))
    return others[:MOST_OTHERS]


def stage_seconds(run: RunData) -> dict[str, np.ndarray]:
    parts = {name: np.nan_to_num(run.train[metric]) for name, metric in ROLLOUT.items()}
    rest = np.clip(np.nan_to_num(run.train["time/rollout"]) - sum(parts.values()), 0.0, None)
    after = {name: np.nan_to_num(run.train[metric]) for name, metric in AFTER_ROLLOUT.items()}
    return {**parts, "rest of the rollout": rest, **after}


def _stages(run: RunData, limit: int) -> Chart | None:
    note = (
        "Prefill, decode and tail are the rollout; the tail is what passes while at most an eighth of the "
        "samples still run."
    )
    return stacked_chart("stages", "Stages of a step", run, stage_seconds(run), SECONDS, limit, note)


def drafters(run: RunData) -> list[str]:
    return sorted({match.group(1) for name in run.train.names if (match := POSITION.fullmatch(name))})


def head_marks(run: RunData) -> list[Mark]:
    """Returns the steps after which a head was published, at most so many that lines stay apart.

    Versions are steps; a head that learns may be compared for a while before it drafts.
    """
    steps = run.train.xs()
    steps = steps[run.train["drafter/version"] == steps]
    kept = steps[np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MOST_MARKS)).astype(int))]
    return [Mark(float(step), "a new head") for step in kept]


def _accept_length(names: Sequence[str]) -> Curves:
    several = {f"speculation/{name}/accept_length": name for name in names} if len(names) > 1 else {}
    return Curves(
        "accept-length",
        "Accept length",
        {"speculation/accept_length": "tokens per draft", **several},
        Axis("accept length", "tokens", low=1.0),
        "Tokens that a row gains per draft, the policy's own token included; 1 is plain decoding.",
    )


def _by_position(run: RunData, drafter: str) -> Curves:
    found = [match for name in run.train.names if (match := POSITION.fullmatch(name))]
    places = sorted(int(match.group(2)) for match in found if match.group(1) == drafter)[:MOST_POSITIONS]
    return Curves(
        f"acceptance-{drafter}",
        f"Acceptance by position: {drafter}",
        {f"speculation/{drafter}/accepted_{i}": f"first {i}" if i > 1 else "first token" for i in places},
        Axis("drafts accepted so far", "%", low=0.0, high=100.0),
        "Share of drafts whose first i tokens were all accepted.",
        scale=100.0,
    )
