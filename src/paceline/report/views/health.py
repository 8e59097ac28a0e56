"""Can the samples be trusted? Mismatch between rollout and learner, its correction, FP8, the sentinel."""

from collections.abc import Sequence

from paceline.plots.chart import Axis, Chart
from paceline.report.run_data import RunData
from paceline.report.views.curves import Curves

CURVES = (
    Curves(
        "mismatch",
        "Mismatch between rollout and learner",
        {"mismatch/k3": "KL, k3 estimate", "mismatch/kl": "KL, plain estimate"},
        Axis("KL", "nats per token"),
        "The same tokens scored by the engine that sampled them and by the learner, before the weights move.",
    ),
    Curves(
        "mismatch-largest",
        "Largest difference of a token's probability",
        {"mismatch/largest_probability_difference": "rollout against learner"},
        Axis("difference of probabilities", low=0.0),
    ),
    Curves(
        "ess",
        "Effective sample size under correction",
        {"correction/ess": "effective share of the samples"},
        Axis("share", "%", low=0.0, high=100.0),
        "100%: the correction's weights are all alike; far below: a few tokens carry the update.",
        scale=100.0,
    ),
    Curves(
        "corrected",
        "What the correction changed",
        {
            "correction/clipped": "tokens whose weight was truncated",
            "correction/masked": "tokens that count nothing",
            "correction/rejected_sequences": "responses left out",
        },
        Axis("share", "%", low=0.0),
        scale=100.0,
        hide_zero=True,
    ),
    Curves(
        "kv-error",
        "FP8 calibration",
        {"precision/kv_error": "error of attention with the FP8 cache, worst layer"},
        Axis("relative error", low=0.0),
        "At the last calibration.",
    ),
    Curves(
        "kv-layers",
        "Layers whose cache went back to the policy's own type",
        {"precision/kv_base_layers": "layers"},
        Axis("layers", low=0.0),
    ),
    Curves(
        "sentinel",
        "Sentinel",
        {
            "rollout/fell_back": "rollouts in base precision (1: yes)",
            "policy/skipped": "update skipped (1: yes)",
            "policy/failed_steps": "failed steps in a row",
        },
        Axis("count", low=0.0, high=1.0),
        "FP8 rollouts are given up, and steps made again, where they cannot be trusted.",
        hide_zero=True,
    ),
    Curves(
        "failures",
        "Samples that could not be scored or run",
        {"reward/failures": "reward or tool failed", "rollout/refused": "refused by the engine"},
        Axis("samples", low=0.0),
        hide_zero=True,
    ),
)


def health_charts(runs: Sequence[RunData], limit: int) -> list[Chart]:
    """Returns the charts of this view for one or more runs."""
    charts = [curve.chart(runs, limit) for curve in CURVES]
    return [chart for chart in charts if chart is not None]
