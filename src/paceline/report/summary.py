"""A run in a few numbers, read back from its metrics, so that a resumed run is summarised as a whole."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.report.run_directory import RunDirectory

# The stages of a step, in their order.
STAGES = ("rollout", "learn", "drafter", "sync", "evaluate")


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation of a run."""

    step: int
    accuracy: float
    margin: float  # half width of the accuracy's 95% interval
    length_mean: float
    problems: int

    @property
    def accuracy_text(self) -> str:
        """Returns the accuracy with its margin, in percent."""
        return f"{100 * self.accuracy:.1f}% ± {100 * self.margin:.1f}"


@dataclass(frozen=True)
class Summary:
    """What a run did."""

    run: Path
    steps: int
    tokens: int  # sampled for training
    before: EvalPoint | None
    after: EvalPoint | None
    stage_seconds: dict[str, float]


def summarise_run(run: RunDirectory) -> Summary:
    """Adds up a run's metrics."""
    records = list(run.read_metrics())
    trained = [record for record in records if record["kind"] == "train"]
    evaluations = [_eval_point(record) for record in records if record["kind"] == "eval"]
    ran = [stage for stage in STAGES if any(f"time/{stage}" in record for record in records)]
    seconds = {stage: sum(record.get(f"time/{stage}", 0.0) for record in records) for stage in ran}
    return Summary(
        run=run.path,
        steps=max((record["step"] for record in trained), default=0),
        tokens=int(sum(record["rollout/tokens"] for record in trained)),
        before=evaluations[0] if evaluations else None,
        after=evaluations[-1] if evaluations else None,
        stage_seconds=seconds,
    )


def _eval_point(record: dict[str, Any]) -> EvalPoint:
    return EvalPoint(
        step=record["step"],
        accuracy=record["eval/accuracy"],
        margin=record["eval/accuracy_margin"],
        length_mean=record["eval/length_mean"],
        problems=int(record["eval/problems"]),
    )
