"""Does the policy learn? Rewards, accuracy, lengths, entropy and the update itself."""

from collections.abc import Sequence

from paceline.plots.chart import Axis, Chart
from paceline.report.run_data import RunData
from paceline.report.views.curves import Curves

SHARE = Axis("share", "%", low=0.0)
TOKENS = Axis("response length", "tokens", low=0.0)

EVALUATION = Curves(
    "accuracy-held-out",
    "Accuracy on held-out problems",
    {"eval/accuracy": "avg@n"},
    Axis("correct", "%", low=0.0, high=100.0),
    "The same problems and seeds at every evaluation; the band is the 95% interval over problems.",
    scale=100.0,
    margins={"eval/accuracy": "eval/accuracy_margin"},
    evals=True,
    points=True,
)

CURVES = (
    EVALUATION,
    Curves(
        "reward",
        "Reward",
        {"reward/mean": "mean reward"},
        Axis("reward"),
        "Mean over the step's samples: what the learner maximises.",
    ),
    Curves(
        "accuracy-train",
        "Accuracy on training problems",
        {"rollout/accuracy": "correct"},
        Axis("correct", "%", low=0.0, high=100.0),
        "Share of the step's samples that were right.",
        scale=100.0,
    ),
    Curves(
        "lengths",
        "Response lengths",
        {
            "rollout/length_mean": "mean",
            "rollout/length_p95": "95th percentile",
            "rollout/length_max": "longest",
        },
        TOKENS,
        "The distance between mean and longest is the long tail that a rollout waits for.",
    ),
    Curves(
        "entropy",
        "Entropy of the policy",
        {"policy/entropy": "entropy"},
        Axis("entropy", "nats per token", low=0.0),
        "It falls as the policy becomes sure; near 0 it no longer explores.",
    ),
    Curves(
        "kl",
        "KL divergence",
        {
            "policy/approximate_kl": "from the rollout's policy",
            "policy/reference_kl": "to the starting policy",
        },
        Axis("KL", "nats per token"),
        "How far an update moved the policy; the second where learning.kl_coef is on.",
        hide_zero=True,
    ),
    Curves(
        "signal",
        "Groups and samples without signal",
        {
            "rollout/zero_variance_groups": "groups whose samples scored alike",
            "rollout/truncated": "responses cut at the limit",
            "policy/clip_fraction": "tokens whose gradient was clipped",
        },
        SHARE,
        "Groups that score alike teach nothing; they become many when a task is too easy or too hard.",
        scale=100.0,
        hide_zero=True,
    ),
    Curves(
        "gradient",
        "Gradient norm",
        {"policy/gradient_norm": "before clipping"},
        Axis("gradient norm", low=0.0),
    ),
    Curves(
        "rate", "Learning rate", {"policy/learning_rate": "learning rate"}, Axis("learning rate", low=0.0)
    ),
)


def learning_charts(runs: Sequence[RunData], limit: int) -> list[Chart]:
    """Returns the charts of this view for one or more runs."""
    curves = [*CURVES, _pass_at(runs), _components(runs)]
    charts = [curve.chart(runs, limit) for curve in curves if curve is not None]
    return [chart for chart in charts if chart is not None]


def _pass_at(runs: Sequence[RunData]) -> Curves | None:
    names = {name for run in runs for name in run.evals.names}
    metrics = sorted(
        (n for n in names if n.startswith("eval/pass@") and not n.endswith("_margin")),
        key=lambda name: int(name.partition("@")[2] or 0) if name.partition("@")[2].isdigit() else 0,
    )
    if not metrics:
        return None
    return Curves(
        "pass-at",
        "pass@k on held-out problems",
        {name: name.removeprefix("eval/") for name in metrics},
        Axis("solved", "%", low=0.0, high=100.0),
        "Share of problems that at least one of k samples solves; bands are 95% intervals.",
        scale=100.0,
        margins={name: f"{name}_margin" for name in metrics},
        evals=True,
        points=True,
    )


def _components(runs: Sequence[RunData]) -> Curves | None:
    """Returns the parts of the reward, where a task has more than one."""
    names = {name for run in runs for name in run.train.names if name.startswith("reward/")}
    names -= {"reward/mean", "reward/std", "reward/failures"}
    parts = sorted(name for name in names if not name.startswith("reward/failed/"))
    if len(parts) < 2:
        return None
    return Curves(
        "components",
        "Parts of the reward",
        {name: name.removeprefix("reward/") for name in parts},
        Axis("reward"),
        "Means of what the task's reward functions report one by one.",
    )
