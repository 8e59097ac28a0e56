"""Prints a run's progress: a line per step, evaluations, and a closing table."""

from pathlib import Path
from typing import TYPE_CHECKING

import rich.console
from rich.table import Table
from rich.text import Text

from paceline.report.summary import Summary
from paceline.rollout.evaluation import Evaluation

if TYPE_CHECKING:
    from paceline.certify.closing_check import SpeculationCheck
    from paceline.plan.plan import Plan


class Console:
    """Prints to stdout, unless quiet, and warnings to stderr."""

    def __init__(self, quiet: bool = False) -> None:
        # Without emoji codes: a path may hold `:bug:`.
        self.out = rich.console.Console(quiet=quiet, highlight=False, emoji=False)
        self.errors = rich.console.Console(stderr=True, highlight=False, emoji=False)
        self.total_steps = 0

    def warn(self, message: str) -> None:
        """Prints a warning."""
        self.errors.print(message, style="yellow", markup=False)  # values in brackets are no markup

    def plan(self, plan: "Plan | None") -> None:
        """Prints the plan of a GPU's memory; on a CPU there is none."""
        if plan is not None:
            asleep = ", asleep while learning" if plan.sleeps else ""
            used = f"{plan.peak_bytes / 1e9:.1f} of {plan.machine.total_bytes / 1e9:.1f} GB at the peak"
            self.out.print(
                f"memory plan for {plan.machine.name}: {used}, KV pool of {plan.kv_tokens} tokens{asleep}"
            )

    def start_of_run(self, policy: str, task: str, device: str, run: Path) -> None:
        """Says what is about to happen, and where it is written."""
        self.out.print(
            f"training {policy} on {task}; {device}; run directory {run}", markup=False, soft_wrap=True
        )

    def resumed(self, run: Path, step: int) -> None:
        """Prints where a resumed run continues."""
        self.out.print(f"resuming {run} after step {step}", markup=False, soft_wrap=True)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Prints the accuracy on held-out problems."""
        count = f"{evaluation.problems} held-out problems x {evaluation.samples}"
        self.out.print(
            Text.assemble(
                (f"step {step}: accuracy {evaluation.accuracy}", "bold"),
                f" on {count}, mean length {evaluation.mean_length:.0f}",
            )
        )

    def start(self, total_steps: int) -> None:
        """Prints the header of the lines that `step` prints."""
        self.total_steps = total_steps
        header = (
            f"{'step':>9} {'reward':>7} {'accuracy':>8} {'length':>7} {'max':>5} "
            f"{'entropy':>8} {'tok/s':>7} {'rollout':>8} {'learn':>7}"
        )
        self.out.print(f"[dim]{header}[/]")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Prints the line of one step, with the reason where its update was skipped."""
        entropy = metrics.get("policy/entropy")
        note = f"  [yellow]{_why_skipped(metrics)}, weights kept[/]" if metrics["policy/skipped"] else ""
        self.out.print(
            f"{step:>4}/{self.total_steps:<4} "
            f"{metrics['reward/mean']:>7.3f} {metrics['rollout/accuracy']:>8.3f} "
            f"{metrics['rollout/length_mean']:>7.1f} {metrics['rollout/length_max']:>5.0f} "
            f"{'-' if entropy is None else format(entropy, '.4f'):>8} "
            f"{metrics['time/tokens_per_second']:>7.0f} "
            f"{metrics['time/rollout']:>7.2f}s {metrics['time/learn']:>6.2f}s{note}"
        )

    def speculation(self, check: "SpeculationCheck") -> None:
        """Prints what the closing check found: the speed-up, and whether the tokens are identical."""
        identical = (
            "not promised by rejection" if check.identical is None else "yes" if check.identical else "NO"
        )
        self.out.print(
            "one late step replayed on the same seeds: "
            f"plain {check.plain_seconds:.2f} s in {check.plain_steps} steps, "
            f"with speculation {check.paced_seconds:.2f} s in {check.paced_steps} steps: {check.ratio:.2f}x, "
            f"accept length {check.accept_length:.2f}, tokens identical: {identical}"
        )

    def summary(self, summary: Summary) -> None:
        """Prints accuracy and lengths before and after the run, where its time went, and its folder."""
        table = Table(show_header=True, header_style="bold", title="what the run did", title_justify="left")
        before = summary.before
        after = summary.after
        # An interrupted run was last evaluated some steps ago, or never since it began.
        late = f"after step {after.step}" if after is not None and after.step < summary.steps else "after"
        for column in ("", "before", late):
            table.add_column(column)
        if before is not None:
            rows = {
                "held-out accuracy": lambda point: point.accuracy_text,
                "problems": lambda point: f"{point.problems}",
                "response length, mean": lambda point: f"{point.length_mean:.1f}",
            }
            for name, show in rows.items():
                table.add_row(name, Text(show(before)), Text(show(after) if after else "not evaluated yet"))
        self.out.print(table)
        stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in summary.stage_seconds.items())
        self.out.print(f"{summary.steps} steps, {summary.tokens} tokens sampled; time: {stages}")
        self.out.print(f"run directory: {summary.run}", markup=False, soft_wrap=True)


def _why_skipped(metrics: dict[str, float]) -> str:
    if metrics.get("policy/nonfinite_updates"):
        return "not finite: the update was skipped"
    if metrics.get("policy/masked_updates"):
        return "masked: learning.correction left no token to learn from"
    return "no signal: every group scored alike"
