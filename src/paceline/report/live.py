"""The view of a run that stays at the bottom of a terminal: where it is, how it goes, what the rollout does.

It reads what others write anyway (the sampler's progress, the backend's statistics, the clock), a few times a
second from rich's own thread, and changes nothing.
"""

import time
from collections import deque
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from paceline.report.clock import StageClock
from paceline.rollout.sampler import GroupSampler
from paceline.stats import RolloutStats

BLOCKS = "▁▂▃▄▅▆▇█"

# Steps that the sparkline shows and the time left is estimated from.
RECENT = 24

# Decode steps whose speed counts as that of the moment.
MOMENT = 4


def sparkline(values: Sequence[float]) -> str:
    """Returns values as blocks between their lowest and highest; a flat line lies in the middle."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high - low < 1e-12:
        return BLOCKS[3] * len(values)
    return "".join(BLOCKS[min(7, int(8 * (value - low) / (high - low)))] for value in values)


def duration(seconds: float) -> str:
    """Returns a duration for people: 42 s, 3:07, 2:03:07."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"


class LiveView:
    """Up to three lines about a run; each is cut to the width there is."""

    def __init__(self, sampler: GroupSampler, clock: StageClock) -> None:
        self.sampler = sampler
        self.clock = clock
        self.step = 0
        self.total_steps = 0
        self.rewards: deque[float] = deque(maxlen=RECENT)
        self.accuracies: deque[float] = deque(maxlen=RECENT)
        self.step_seconds: deque[float] = deque(maxlen=RECENT)
        self.stages: dict[str, float] = {}
        self.held_out = ""
        self.accept_length = 0.0

    def note_step(self, step: int, metrics: dict[str, float]) -> None:
        self.step = step
        self.rewards.append(metrics["reward/mean"])
        self.accuracies.append(metrics["rollout/accuracy"])
        self.step_seconds.append(metrics.get("time/step", 0.0))
        self.accept_length = metrics.get("speculation/accept_length", 0.0)
        for stage in ("rollout", "learn", "drafter", "sync"):
            if f"time/{stage}" in metrics:
                self.stages[stage] = metrics[f"time/{stage}"]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in (self._run_line(), self._rollout_line(), self._stage_line()):
            if line:
                yield Text(
                    line, no_wrap=True, overflow="ellipsis", style="dim" if console.color_system else ""
                )

    def _run_line(self) -> str:
        if not self.rewards:
            return ""
        mean = sum(self.step_seconds) / len(self.step_seconds)
        left = duration(mean * (self.total_steps - self.step))
        parts = [
            f"step {self.step}/{self.total_steps}",
            f"reward {self.rewards[-1]:.3f} {sparkline(self.rewards)}",
            f"accuracy {100 * self.accuracies[-1]:.0f}% {sparkline(self.accuracies)}",
            f"held-out {self.held_out}" if self.held_out else "",
            f"{left} left",
        ]
        return "  ".join(part for part in parts if part)

    def _rollout_line(self) -> str:
        if self.clock.stage not in ("rollout", "evaluate"):
            return f"{self.clock.stage} …" if self.clock.stage else ""
        progress = self.sampler.progress
        parts = [self.clock.stage, f"finished {progress.finished}/{progress.total}"]
        stats = self.sampler.backend.live_stats()
        tokens = progress.tokens
        if stats is not None and stats.running:
            tokens = sum(row.tokens for row in list(stats.trace))
            parts.insert(1, f"running {stats.running[-1]}")
        seconds = time.perf_counter() - progress.begun
        parts += [f"{tokens / max(seconds, 1e-3):.0f} tokens/s", f"longest {progress.longest}"]
        if stats is not None and stats.strategies:
            parts.append(_strategy_now(stats))
        return "  ".join(parts)

    def _stage_line(self) -> str:
        whole = sum(self.stages.values())
        if not whole:
            return ""
        shares = "  ".join(f"{stage} {s:.1f} s ({100 * s / whole:.0f}%)" for stage, s in self.stages.items())
        return f"last step: {shares}"


def _strategy_now(stats: RolloutStats) -> str:
    """Returns the strategy in use and the tokens that a request gains per step with it."""
    rows = list(stats.trace)[-MOMENT:]
    gained = sum(row.tokens for row in rows) / max(1, sum(row.rows for row in rows))
    return f"{stats.strategies[-1]} ({gained:.1f} tokens per step)"
