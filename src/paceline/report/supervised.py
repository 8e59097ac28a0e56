"""Prints the progress of supervised fine-tuning: a line per step, held-out losses, and a live line below."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.live import Live
from rich.text import Text

from paceline.config import Config
from paceline.report.console import REFRESHES, Console
from paceline.report.live import RECENT, duration, sparkline


class SupervisedConsole(Console):
    """A console whose steps have a loss instead of a reward."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self.losses: deque[float] = deque(maxlen=RECENT)
        self.step_seconds: deque[float] = deque(maxlen=RECENT)
        self.now = 0
        self.held_out = ""
        self.live = False

    def say(self, text: str) -> None:
        self.out.print(text, markup=False)

    @contextmanager
    def watching_losses(self) -> Iterator[None]:
        """Shows how far the run is while it runs, on a terminal that can draw it."""
        self.live = self.out.is_terminal and not self.out.quiet and not self.out.is_dumb_terminal
        if not self.live:
            yield
            return
        with Live(get_renderable=self._line, console=self.out, refresh_per_second=REFRESHES, transient=True):
            yield

    def warn(self, message: str) -> None:
        target = self.out if self.live and self.errors.is_terminal else self.errors
        target.print(message, style="yellow", markup=False)

    def start_of_tuning(self, config: Config, device: torch.device, run: Path) -> None:
        """Prints what is trained on what, and the header of the lines that `step` prints."""
        self.total_steps = config.run.steps
        source = config.sft.data or f"demonstrations of {config.task.name}"
        self.say(
            f"fine-tuning {config.policy.path} on {source}, lr {config.sft.lr:g}; {device.type}; run "
            f"directory {run}"
        )
        header = f"{'step':>9} {'loss':>8} {'gradient':>9} {'lr':>9} {'tokens/s':>9} {'seconds':>8}"
        self.out.print(f"[dim]{header}[/]")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.now = step
        self.losses.append(metrics["sft/loss"])
        self.step_seconds.append(metrics["time/step"])
        note = (
            "  [yellow]not finite: the update was skipped[/]" if metrics["policy/nonfinite_updates"] else ""
        )
        self.out.print(
            f"{step:>4}/{self.total_steps:<4} {metrics['sft/loss']:>8.4f} "
            f"{metrics['policy/gradient_norm']:>9.3f} {metrics['policy/learning_rate']:>9.2e} "
            f"{metrics['time/tokens_per_second']:>9.0f} {metrics['time/step']:>7.2f}s{note}"
        )

    def held_out_loss(self, step: int, loss: float) -> None:
        self.held_out = f"{loss:.4f}"
        self.out.print(Text(f"step {step}: held-out loss {loss:.4f}", style="bold"))

    def _line(self) -> Text:
        if not self.losses:
            return Text("")
        mean = sum(self.step_seconds) / len(self.step_seconds)
        parts = [
            f"step {self.now}/{self.total_steps}",
            f"loss {self.losses[-1]:.4f} {sparkline(self.losses)}",
            f"held-out {self.held_out}" if self.held_out else "",
            f"{duration(mean * (self.total_steps - self.now))} left",
        ]
        line = "  ".join(part for part in parts if part)
        return Text(line, no_wrap=True, overflow="ellipsis", style="dim" if self.out.color_system else "")
