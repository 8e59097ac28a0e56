"""`paceline bench pacing`: one long-tailed rollout with plain decoding, with each fixed strategy, and with
the pacer.

Same requests, same seeds, and in deterministic mode the same tokens, which is checked. A token of each
request comes first, so that nobody is charged for compiling the prefill. Graphs are captured when first
needed; their time is taken out of a rollout's seconds and reported beside it, because a run captures once and
rolls out often. The pacer runs twice or more: first knowing nothing, then with what it has learnt, as from
the second step of an RL run on.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

from paceline.engine.engine import Engine
from paceline.pacing.strategy import PLAIN, FixedPacer, Pacer, Strategy
from paceline.pacing.trace import TraceRow
from paceline.types import Completion, Request


@dataclass
class Stage:
    """Of a rollout: the steps with at most `running` requests, and more than half as many."""

    running: int
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    disturbed_seconds: float = 0.0  # of these, in steps that also waited for a prefill or a capture


def stages(trace: Sequence[TraceRow]) -> list[Stage]:
    """By powers of two, the largest batch first."""
    by_running: dict[int, Stage] = {}
    for row in trace:
        running = 1 << (math.ceil(row.running) - 1).bit_length()
        stage = by_running.setdefault(running, Stage(running))
        stage.steps += row.steps
        stage.tokens += row.tokens
        stage.seconds += row.seconds
        stage.disturbed_seconds += row.disturbed_seconds
    return sorted(by_running.values(), key=lambda stage: -stage.running)


@dataclass(frozen=True)
class PacingPoint:
    name: str
    seconds: float  # without capturing
    capture_seconds: float
    decode_steps: int
    accept_length: float  # tokens emitted per draft, the policy's own included
    identical: float  # share of completions equal to plain decoding's
    pool_gb: float  # of the graph pool after this rollout
    graphs: int
    trial_steps: float = 0.0  # share of the steps that were spent on finding something out
    trial_seconds: float = 0.0  # and of their time
    stages: list[Stage] = field(default_factory=list)

    def record(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class PacingResult:
    requests: int
    tokens: int
    longest: int
    points: list[PacingPoint]
    trace: list[TraceRow]  # of the last paced rollout

    def named(self, name: str) -> PacingPoint:
        return next(point for point in self.points if point.name == name)

    @property
    def plain(self) -> PacingPoint:
        return self.points[0]

    @property
    def best_fixed(self) -> PacingPoint:
        """Plain decoding is one of them."""
        return min((p for p in self.points if not p.name.startswith("paced")), key=lambda p: p.seconds)

    @property
    def paced(self) -> PacingPoint:
        return self.points[-1]


def bench_pacing(
    engine: Engine,
    requests: list[Request],
    fixed: list[Strategy],
    pacer: Pacer,
    rollouts: int,
    after_plain: Callable[[Iterable[Completion]], None] = lambda completions: None,
    progress: Callable[[PacingPoint], None] = lambda point: None,
) -> PacingResult:
    """`after_plain` gets what plain decoding wrote, before anybody else runs."""
    drafters = engine.drafter_state()
    points, reference, trace = [], {}, []

    def run(name: str, chosen: Pacer) -> None:
        nonlocal reference, trace
        engine.load_drafter_state(drafters)
        engine.pacer = chosen
        engine.take_stats()
        captured, start = engine.runner.capture_seconds, time.perf_counter()
        engine.submit(requests)
        done = {completion.request.id: completion for completion in engine.completions()}
        seconds, capturing = time.perf_counter() - start, engine.runner.capture_seconds - captured
        stats = engine.take_stats()
        trace = stats.trace
        if not reference:
            reference = done
            after_plain(done.values())
        drafts, trials = list(stats.drafts.values()), [row for row in trace if row.decision.reason == "trial"]
        point = PacingPoint(
            name,
            seconds - capturing,
            capturing,
            len(stats.running),
            1 + sum(d.accepted for d in drafts) / max(1, sum(d.drafts for d in drafts)),
            sum(done[i].tokens == reference[i].tokens for i in reference) / len(reference),
            engine.runner.memory.pool_bytes / 1e9,
            len(engine.runner.captured) + len(engine.runner.captured_drafts),
            sum(row.steps for row in trials) / len(stats.running),
            sum(row.seconds for row in trials) / sum(row.seconds for row in trace),
            stages(trace),
        )
        points.append(point)
        progress(point)

    engine.pacer = FixedPacer(PLAIN)
    engine.submit(
        [replace(request, sampling=replace(request.sampling, max_tokens=1)) for request in requests]
    )
    assert sum(1 for _ in engine.completions()) == len(requests)
    run("plain", FixedPacer(PLAIN))
    for strategy in fixed:
        run(str(strategy), FixedPacer(strategy))
    for number in range(1, rollouts + 1):
        run(f"paced {number}", pacer)
    lengths = [len(completion.tokens) for completion in reference.values()]
    return PacingResult(len(requests), sum(lengths), max(lengths), points, trace)
