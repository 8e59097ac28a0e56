"""Prints a run's progress: a line per step, evaluations, a closing table, and below them what happens now.

On a terminal the newest lines are a live view (`report/live.py`); elsewhere there are plain lines that no
width cuts. `NO_COLOR` and narrow terminals are respected by what is printed, `quiet` by printing nothing.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import rich.console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.report.clock import StageClock
from paceline.report.live import LiveView
from paceline.report.summary import Summary
from paceline.rollout.evaluation import Evaluation
from paceline.rollout.sampler import GroupSampler

if TYPE_CHECKING:
    from paceline.certify.closing_check import SpeculationCheck
    from paceline.plan.plan import Plan

# Columns that a step's full line takes; below, a shorter one is printed.
FULL_LINE = 75

# Times a second that the live view is drawn.
REFRESHES = 4


class Console:
    """Prints to stdout, unless quiet, and warnings to stderr."""

    def __init__(self, quiet: bool = False) -> None:
        # Without emoji codes: a path may hold `:bug:`.
        self.out = rich.console.Console(quiet=quiet, highlight=False, emoji=False, soft_wrap=True)
        self.errors = rich.console.Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
        self.total_steps = 0
        self.view: LiveView | None = None

    @property
    def narrow(self) -> bool:
        """Whether this is a terminal with too few columns for a step's full line."""
        return self.out.is_terminal and self.out.width < FULL_LINE

    @contextmanager
    def watching(self, sampler: GroupSampler, clock: StageClock) -> Iterator[None]:
        """Shows the live view of a run while it runs, on a terminal that can draw it."""
        if self.out.quiet or not self.out.is_terminal or self.out.is_dumb_terminal:
            yield
            return
        self.view = LiveView(sampler, clock)
        try:
            with Live(self.view, console=self.out, refresh_per_second=REFRESHES, transient=True):
                yield
        finally:
            self.view = None

    def warn(self, message: str) -> None:
        target = self.out if self.view is not None and self.errors.is_terminal else self.errors
        target.print(message, style="yellow", markup=False)  # values in brackets are no markup

    def plan(self, plan: "Plan | None") -> None:
        """Prints the plan of a GPU's memory; on a CPU there is none."""
        if plan is not None:
            asleep = ", asleep while learning" if plan.sleeps else ""
            used = f"{plan.peak_bytes / 1e9:.1f} of {plan.machine.total_bytes / 1e9:.1f} GB at the peak"
            self.out.print(
                f"memory plan for {plan.machine.name}: {used}, KV pool of {plan.kv_tokens} tokens{asleep}"
            )

    def start_of_run(self, policy: str, task: str, device: str, run: Path) -> None:
        """Prints policy, task and device of the run, and its folder."""
        self.out.print(
            f"training {policy} on {task}; {device}; run directory {run}", markup=False, soft_wrap=True
        )

    def resumed(self, run: Path, step: int) -> None:
        self.out.print(f"resuming {run} after step {step}", markup=False, soft_wrap=True)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        if self.view is not None:
            self.view.held_out = str(evaluation)
        count = f"{evaluation.problems} held-out problems x {evaluation.samples}"
        self.out.print(
            Text.assemble(
                (f"step {step}: {evaluation}", "bold"),
                f" on {count}, mean length {evaluation.mean_length:.0f}",
            )
        )

    def start(self, total_steps: int) -> None:
        """Prints the header of the lines that `step` prints."""
        self.total_steps = total_steps
        if self.view is not None:
            self.view.total_steps = total_steps
        header = (
            f"{'step':>9} {'reward':>7} {'accuracy':>8} {'length':>7} {'max':>5} "
            f"{'entropy':>8} {'tok/s':>7} {'rollout':>8} {'learn':>7}"
        )
        if self.narrow:
            header = f"{'step':>9} {'reward':>7} {'tok/s':>7} {'seconds':>8}"
        self.out.print(f"[dim]{header}[/]")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Prints the line of one step, with the reason where its update was skipped."""
        if self.view is not None:
            self.view.note_step(step, metrics)
        entropy = metrics.get("policy/entropy")
        note = f"  [yellow]{_why_skipped(metrics)}, weights kept[/]" if metrics["policy/skipped"] else ""
        speed = metrics["time/tokens_per_second"]
        if self.narrow:
            seconds = metrics["time/rollout"] + metrics["time/learn"]
            self.out.print(
                f"{step:>4}/{self.total_steps:<4} {metrics['reward/mean']:>7.3f} {speed:>7.0f} "
                f"{seconds:>7.2f}s{note}"
            )
            return
        self.out.print(
            f"{step:>4}/{self.total_steps:<4} "
            f"{metrics['reward/mean']:>7.3f} {metrics['rollout/accuracy']:>8.3f} "
            f"{metrics['rollout/length_mean']:>7.1f} {metrics['rollout/length_max']:>5.0f} "
            f"{'-' if entropy is None else format(entropy, '.4f'):>8} "
            f"{speed:>7.0f} "
            f"{metrics['time/rollout']:>7.2f}s {metrics['time/learn']:>6.2f}s{note}"
        )

    def speculation(self, check: "SpeculationCheck") -> None:
        identical = (
            "not promised by rejection" if check.identical is None else "yes" if check.identical else "NO"
        )
        saved = check.plain_steps - check.paced_steps
        self.out.print(
            f"one late step replayed {len(check.plain)} times each way, in turn, on the same seeds:\n"
            f"  plain              {_spread(check.plain)} s in {check.plain_steps} policy steps\n"
            f"  with speculation   {_spread(check.paced)} s in {check.paced_steps} policy steps "
            f"({saved} saved, {100 * saved / max(1, check.plain_steps):.0f}%)\n"
            f"  {speed_verdict(check)}; accept length {check.accept_length:.2f}; "
            f"tokens identical: {identical}",
            markup=False,
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
            if any(point.graded for point in (before, after) if point is not None):
                rows["held-out reward"] = lambda point: "-" if point.reward is None else f"{point.reward:.3f}"
            for name, show in rows.items():
                table.add_row(name, Text(show(before)), Text(show(after) if after else "not evaluated yet"))
        self.out.print(table)
        stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in summary.stage_seconds.items())
        self.out.print(f"{summary.steps} steps, {summary.tokens} tokens sampled; time: {stages}")
        if summary.unscored:
            log = summary.run / "rewards.log"
            self.warn(
                f"{summary.unscored} of {summary.samples} samples have no score of their own, because a "
                f"reward or tool failed: see reward/failed/... in metrics.jsonl, and {log}"
            )
        if summary.best is not None and summary.steps:
            self.out.print(f"best policy: that of step {summary.best.step}, in checkpoints/best")
        self.out.print(f"run directory: {summary.run}", markup=False, soft_wrap=True)
        self.out.print(f"report: {summary.run / 'report.html'}", markup=False, soft_wrap=True)


def speed_verdict(check: "SpeculationCheck") -> str:
    """Returns the median of the pairs' ratios with its interval, or that it cannot be determined."""
    low, high = check.interval
    figures = f"{check.ratio:.2f}x, between {low:.2f} and {high:.2f} in {len(check.ratios)} pairs"
    return f"speed: too noisy to tell ({figures})" if check.too_noisy else f"speed: {figures}"


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} [{min(seconds):.2f}, {max(seconds):.2f}]"


def _why_skipped(metrics: dict[str, float]) -> str:
    if metrics.get("policy/nonfinite_updates"):
        return "not finite: the update was skipped"
    if metrics.get("policy/masked_updates"):
        return "masked: learning.correction left no token to learn from"
    return "no signal: every group scored alike"
