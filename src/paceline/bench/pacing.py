"""`paceline bench pacing`: one long-tailed rollout plainly, with each fixed strategy, and with the pacer.

Same requests, same seeds, and in deterministic mode the same tokens, which is checked. A token of each
request comes first, so that nobody is charged for compiling the prefill. Graphs are captured when first
needed; their time is taken out of a rollout's seconds and reported beside it, because a run captures once and
rolls out often. The pacer runs twice or more: first knowing no more than what timing steps for a second
before it has told, then with what it has learnt, as from the second step of an RL run on.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from paceline.bench.oracle import OracleDrafter
from paceline.bench.setup import bench_requests, refuse_beyond_positions
from paceline.engine.drafters import without_rates
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.factory import START_SECONDS, counts_up_to
from paceline.pacing.adaptive import AdaptivePacer, PacingSettings
from paceline.pacing.strategy import PLAIN, FixedPacer, Pacer, Strategy
from paceline.pacing.trace import TraceRow
from paceline.policy.decoder import Decoder
from paceline.stats import RolloutStats
from paceline.types import Completion, Request

# KV tokens of each row beyond prompt and response: whole blocks, and what is reserved ahead for drafts.
RESERVED_TOKENS = 64 + 256


@dataclass
class Stage:
    """The steps of a rollout with at most `running` requests, and more than half as many."""

    running: int
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    disturbed_seconds: float = 0.0  # of these, in steps that also waited for a prefill or a capture


def stages(trace: Sequence[TraceRow]) -> list[Stage]:
    """Returns a rollout's stages by powers of two, the largest batch first."""
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
    """One rollout under one strategy."""

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
        """Returns the point as JSON takes it."""
        return asdict(self)


@dataclass(frozen=True)
class PacingResult:
    """All rollouts: plain decoding first, then the fixed strategies, then the pacer."""

    requests: int
    tokens: int
    longest: int
    points: list[PacingPoint]
    trace: list[TraceRow]  # of the last paced rollout

    @property
    def plain(self) -> PacingPoint:
        """The rollout with plain decoding."""
        return self.points[0]

    @property
    def best_fixed(self) -> PacingPoint:
        """The fastest rollout without the pacer, plain decoding included."""
        return min((p for p in self.points if not p.name.startswith("paced")), key=lambda p: p.seconds)

    @property
    def paced(self) -> PacingPoint:
        """The last rollout with the pacer."""
        return self.points[-1]


@dataclass(frozen=True)
class SyntheticPacing:
    """A rollout to pace and the synthetic drafter that proposes for it."""

    lengths: tuple[int, ...]  # of the responses
    prompt_tokens: int
    acceptance: tuple[float, ...]  # of the drafter, by depth, the last one repeated
    draft_bytes: int  # that the drafter reads per proposed token
    fixed_tokens: tuple[int, ...]  # proposed per step, each measured as a fixed strategy
    max_tokens: int  # the most that the pacer may choose
    rollouts: int  # with the pacer
    graph_memory: int  # bytes for captured steps


def bench_synthetic(
    policy: Decoder, settings: SyntheticPacing, progress: Callable[[PacingPoint], None]
) -> PacingResult:
    """Runs `bench_pacing` with an `OracleDrafter` that knows what plain decoding wrote."""
    count = len(settings.lengths)
    refuse_beyond_positions(policy.config, settings.prompt_tokens, max(settings.lengths), "--lengths")
    requests = bench_requests(list(settings.lengths), settings.prompt_tokens, policy.config.vocab_size)
    oracle = OracleDrafter(requests, settings.acceptance, settings.draft_bytes)
    kv_tokens = sum(settings.lengths) + count * (settings.prompt_tokens + RESERVED_TOKENS)
    engine_settings = EngineSettings(
        count,
        kv_tokens,
        max_length=settings.prompt_tokens + max(settings.lengths) + 2,
        deterministic=True,
        graph_memory=settings.graph_memory,
        start_seconds=START_SECONDS,
    )
    engine = Engine(policy, engine_settings, drafters=[oracle])
    choices = tuple(Strategy(oracle.name, tokens) for tokens in counts_up_to(settings.max_tokens))
    pacer = AdaptivePacer(PacingSettings(tuple(engine.launcher.buckets), choices))
    fixed = [Strategy(oracle.name, tokens) for tokens in settings.fixed_tokens]
    return bench_pacing(engine, requests, fixed, pacer, settings.rollouts, oracle.learn, progress)


def bench_pacing(
    engine: Engine,
    requests: list[Request],
    fixed: list[Strategy],
    pacer: Pacer,
    rollouts: int,
    after_plain: Callable[[Iterable[Completion]], None] = lambda completions: None,
    progress: Callable[[PacingPoint], None] = lambda point: None,
) -> PacingResult:
    """Measures the rollout under every strategy; `after_plain` gets what plain decoding wrote."""
    unused = without_rates(engine.drafter_state())
    engine.pacer = FixedPacer(PLAIN)
    _compile_prefill(engine, requests)
    plain = _Rollout.run(engine, unused, requests, FixedPacer(PLAIN))
    after_plain(plain.completions.values())
    points = [_point("plain", plain, plain, engine)]
    progress(points[0])
    paced = [(f"paced {number}", pacer) for number in range(1, rollouts + 1)]
    trace = plain.stats.trace
    for name, chosen in [*((str(strategy), FixedPacer(strategy)) for strategy in fixed), *paced]:
        # What a run does before its first step: it is not the rollout's.
        engine.pacer = chosen
        engine.time_steps()
        rollout = _Rollout.run(engine, unused, requests, chosen)
        trace = rollout.stats.trace
        points.append(_point(name, rollout, plain, engine))
        progress(points[-1])
    lengths = [len(completion.tokens) for completion in plain.completions.values()]
    return PacingResult(len(requests), sum(lengths), max(lengths), points, trace)


def _compile_prefill(engine: Engine, requests: list[Request]) -> None:
    """Generates a token of each request, so that no rollout is charged for compiling the prefill."""
    engine.submit(
        [replace(request, sampling=replace(request.sampling, max_tokens=1)) for request in requests]
    )
    assert sum(1 for _ in engine.completions()) == len(requests)


@dataclass(frozen=True)
class _Rollout:
    completions: dict[str, Completion]
    seconds: float  # without capturing
    capture_seconds: float
    stats: RolloutStats

    @classmethod
    def run(
        cls, engine: Engine, unused: dict[str, torch.Tensor], requests: list[Request], pacer: Pacer
    ) -> "_Rollout":
        engine.load_drafter_state(unused)
        engine.pacer = pacer
        engine.take_stats()
        captured = engine.runner.capture_seconds
        start = time.perf_counter()
        engine.submit(requests)
        completions = {completion.request.id: completion for completion in engine.completions()}
        seconds = time.perf_counter() - start
        capturing = engine.runner.capture_seconds - captured
        return cls(completions, seconds - capturing, capturing, engine.take_stats())


def _point(name: str, rollout: _Rollout, plain: _Rollout, engine: Engine) -> PacingPoint:
    stats = rollout.stats
    drafts = list(stats.drafts.values())
    trials = [row for row in stats.trace if row.decision.reason == "trial"]
    same = sum(rollout.completions[i].tokens == plain.completions[i].tokens for i in plain.completions)
    return PacingPoint(
        name,
        seconds=rollout.seconds,
        capture_seconds=rollout.capture_seconds,
        decode_steps=len(stats.running),
        accept_length=1 + sum(d.accepted for d in drafts) / max(1, sum(d.drafts for d in drafts)),
        identical=same / len(plain.completions),
        pool_gb=engine.runner.memory.pool_bytes / 1e9,
        graphs=len(engine.runner.captured) + len(engine.runner.captured_drafts),
        trial_steps=sum(row.steps for row in trials) / len(stats.running),
        trial_seconds=sum(row.seconds for row in trials) / sum(row.seconds for row in stats.trace),
        stages=stages(stats.trace),
    )
