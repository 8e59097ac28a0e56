"""What did speculation give? Accept lengths, acceptance by position, time of drafting and verifying."""

import re
from collections.abc import Sequence

import numpy as np

from paceline.plots.chart import Axis, Chart, Mark
from paceline.report.run_data import RunData
from paceline.report.views.curves import Curves

# Runs whose acceptance is drawn by position.
MOST_RUNS = 3

# Positions of a draft that are drawn.
MOST_POSITIONS = 9

# Steps that are marked.
MOST_MARKS = 40

POSITION = re.compile(r"speculation/(.+)/accepted_(\d+)")

CURVES = (
    Curves(
        "accept-length",
        "Accept length",
        {"speculation/accept_length": "tokens per draft"},
        Axis("accept length", "tokens", low=1.0),
        "Tokens that a row gains per draft, the policy's own token included; 1 is plain decoding.",
    ),
    Curves(
        "speculating",
        "How often the engine speculates",
        {
            "speculation/steps": "decode steps that speculated",
            "speculation/accepted": "proposed tokens accepted",
        },
        Axis("share", "%", low=0.0, high=100.0),
        "The pacer speculates where it expects to be faster, and decodes plainly elsewhere.",
        scale=100.0,
    ),
    Curves(
        "draft-time",
        "Drafting and verifying",
        {"time/drafting": "drafting", "time/verifying": "the policy's own passes"},
        Axis("time", "s", low=0.0),
    ),
    Curves(
        "decode-steps",
        "Decode steps of a rollout",
        {"rollout/decode_steps": "forward passes of the policy"},
        Axis("decode steps", "", low=0.0),
        "Speculation makes them fewer; whether it makes them faster as well is a matter of time, above.",
    ),
    Curves(
        "head-distance",
        "Distance of the head to the policy",
        {"drafter/kl": "KL", "drafter/overlap": "overlap (1 - TV)"},
        Axis("KL in nats, overlap as a share", "", low=0.0),
        "Of the draft's first token, while the head follows the policy.",
    ),
)


def speculation_charts(runs: Sequence[RunData], limit: int) -> list[Chart]:
    """Returns the charts of this view for one or more runs."""
    marks = head_marks(runs[0]) if len(runs) == 1 else []
    charts = [
        curve.chart(runs, limit, marks) for curve in (*CURVES[:1], _by_drafter(runs), *CURVES[1:]) if curve
    ]
    for number, run in enumerate(runs[:MOST_RUNS]):
        charts += [_by_position(run, number, drafter, limit, len(runs) > 1) for drafter in drafters(run)]
    return [chart for chart in charts if chart is not None]


def drafters(run: RunData) -> list[str]:
    """Returns the names of the run's drafters."""
    found = {match.group(1) for name in run.train.names if (match := POSITION.fullmatch(name))}
    return sorted(found)


def head_marks(run: RunData) -> list[Mark]:
    """Returns the steps after which a head was published, at most so many that lines stay apart.

    Versions are steps; a head that learns may be compared for a while before it drafts.
    """
    steps = run.train.xs()
    steps = steps[run.train["drafter/version"] == steps]
    kept = steps[np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MOST_MARKS)).astype(int))]
    return [Mark(float(step), "a new head") for step in kept]


def _by_drafter(runs: Sequence[RunData]) -> Curves | None:
    names = sorted({drafter for run in runs for drafter in drafters(run)})
    if len(names) < 2:
        return None
    return Curves(
        "accept-length-drafters",
        "Accept length by drafter",
        {f"speculation/{name}/accept_length": name for name in names},
        Axis("accept length", "tokens", low=1.0),
    )


def _by_position(run: RunData, number: int, drafter: str, limit: int, several: bool) -> Chart | None:
    positions = sorted(
        int(match.group(2))
        for name in run.train.names
        if (match := POSITION.fullmatch(name)) and match.group(1) == drafter
    )
    marks = head_marks(run)
    shown = positions[:MOST_POSITIONS]
    curves = Curves(
        f"acceptance-{number}-{drafter}",
        f"Acceptance by position: {drafter}" + (f", {run.label}" if several else ""),
        {f"speculation/{drafter}/accepted_{i}": f"first {i}" if i > 1 else "first token" for i in shown},
        Axis("drafts accepted so far", "%", low=0.0, high=100.0),
        "Share of drafts whose first i tokens were all accepted."
        + (" Dashed lines: a new head was published." if marks else ""),
        scale=100.0,
    )
    return curves.chart([run], limit, marks)
