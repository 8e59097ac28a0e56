"""`/metrics` in Prometheus' text format."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from paceline.serving.frames import Counters

FIRST_TOKEN_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


@dataclass
class Histogram:
    """How many values were at most as large as each bound."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def note(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str) -> list[str]:
        below = 0
        lines = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {below}')
        return [*lines, f"{name}_sum {self.total}", f"{name}_count {below}"]


@dataclass
class Metrics:
    """What the server counts beside the engine's own counters."""

    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_SECONDS))
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)  # by path and status

    def text(self, engine: Counters, outstanding: int) -> str:
        """Returns all of them; token rates and accept lengths are quotients of counters."""
        drafted = 1.0 + engine.accepted_tokens / engine.drafts if engine.drafts else 1.0
        lines = []
        for name, kind, help_, value in (
            ("requests_running", "gauge", "requests that are being decoded", engine.running),
            ("requests_waiting", "gauge", "requests that wait for a place or their prefill", engine.waiting),
            ("requests_outstanding", "gauge", "requests that have not been answered", outstanding),
            ("generated_tokens_total", "counter", "sampled tokens", engine.generated_tokens),
            (
                "prefill_tokens_total",
                "counter",
                "prompt tokens that were not in the cache",
                engine.prefill_tokens,
            ),
            ("steps_total", "counter", "decode steps", engine.steps),
            ("step_seconds_total", "counter", "time in decode steps", engine.step_seconds),
            ("drafts_total", "counter", "proposals of a drafter", engine.drafts),
            ("accepted_tokens_total", "counter", "proposed tokens that were sampled", engine.accepted_tokens),
            (
                "accept_length",
                "gauge",
                "mean tokens of a step with a draft, the policy's own included",
                drafted,
            ),
        ):
            full = f"paceline_{name}"
            lines += [f"# HELP {full} {help_}", f"# TYPE {full} {kind}", f"{full} {value}"]
        full = "paceline_time_to_first_token_seconds"
        lines += [f"# HELP {full} from a request's arrival to its first token", f"# TYPE {full} histogram"]
        lines += self.first_token.lines(full)
        full = "paceline_answers_total"
        lines += [f"# HELP {full} answers by path and status", f"# TYPE {full} counter"]
        for (path, status), count in sorted(self.answers.items()):
            lines.append(f'{full}{{path="{path}",status="{status}"}} {count}')
        return "\n".join(lines) + "\n"
