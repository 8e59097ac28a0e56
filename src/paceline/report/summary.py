"""A run in a few numbers, read back from its metrics, so that a resumed run is summarised as a whole."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.report.run_directory import RunDirectory, has_numbers

logger = logging.getLogger(__name__)

# The stages of a step, in their order.
STAGES = ("rollout", "learn", "drafter", "sync", "evaluate")

# The keys that a record of each kind has in any version.
NEEDED = {
    "train": ("rollout/tokens",),
    "eval": ("eval/accuracy", "eval/accuracy_margin", "eval/length_mean", "eval/problems"),
}


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation of a run."""

    step: int
    accuracy: float
    low: float  # ends of the accuracy's 95% interval
    high: float
    length_mean: float
    problems: int
    reward: float | None  # of runs of earlier versions it is not known

    @property
    def accuracy_text(self) -> str:
        """Returns the accuracy with its interval, in percent."""
        return f"{100 * self.accuracy:.1f}% [{100 * self.low:.1f}, {100 * self.high:.1f}]"

    @property
    def graded_by(self) -> float:
        """What the best policy is chosen by."""
        return self.accuracy if self.reward is None else self.reward

    @property
    def graded(self) -> bool:
        """Whether the mean reward differs from the accuracy."""
        return self.reward is not None and self.reward != self.accuracy


@dataclass(frozen=True)
class Summary:
    """What a run did."""

    run: Path
    steps: int
    tokens: int  # sampled for training
    before: EvalPoint | None
    after: EvalPoint | None  # the last evaluation after `before`; None where none was made yet
    best: EvalPoint | None  # whose policy is in `checkpoints/best`
    samples: int
    unscored: int  # samples of which a reward failed
    stage_seconds: dict[str, float]


def summarise_run(run: RunDirectory) -> Summary:
    records = [record for record in run.read_metrics() if record["kind"] in NEEDED]
    whole = [record for record in records if has_numbers(record, *NEEDED[record["kind"]])]
    if len(whole) < len(records):
        logger.warning(
            "%s: %d records lack what every step has; they are left out of the summary",
            run.metrics_path,
            len(records) - len(whole),
        )
    trained = [record for record in whole if record["kind"] == "train"]
    evaluations = [_eval_point(record) for record in whole if record["kind"] == "eval"]
    ran = [stage for stage in STAGES if any(has_numbers(record, f"time/{stage}") for record in whole)]
    return Summary(
        run=run.path,
        steps=max((record["step"] for record in trained), default=0),
        tokens=int(sum(record["rollout/tokens"] for record in trained)),
        before=evaluations[0] if evaluations else None,
        after=evaluations[-1] if evaluations and evaluations[-1].step > evaluations[0].step else None,
        best=max(evaluations, key=lambda point: (point.graded_by, point.step), default=None),
        samples=_count(trained, "rollout/samples"),
        unscored=_count(trained, "reward/failures"),
        stage_seconds={stage: _total(whole, f"time/{stage}") for stage in ran},
    )


def _total(records: list[dict[str, Any]], key: str) -> float:
    return sum(record[key] for record in records if has_numbers(record, key))


def _count(records: list[dict[str, Any]], key: str) -> int:
    return int(_total(records, key))


def _eval_point(record: dict[str, Any]) -> EvalPoint:
    accuracy = record["eval/accuracy"]
    margin = record.get("eval/accuracy_margin") or 0.0
    low, high = accuracy - margin, accuracy + margin
    if has_numbers(record, "eval/accuracy_low", "eval/accuracy_high"):  # earlier versions did not keep them
        low, high = record["eval/accuracy_low"], record["eval/accuracy_high"]
    return EvalPoint(
        step=record["step"],
        accuracy=accuracy,
        low=low,
        high=high,
        length_mean=record["eval/length_mean"],
        problems=int(record["eval/problems"]),
        reward=record["eval/reward"] if has_numbers(record, "eval/reward") else None,
    )
