"""`paceline bench rollout`: a whole rollout with lengths like RL's, most short and a few very long."""

import time
from dataclasses import asdict, dataclass

from paceline.bench.lengths import Lengths
from paceline.bench.setup import bench_requests, refuse_beyond_positions
from paceline.bench.spread import Spread
from paceline.engine.drafters import without_rates
from paceline.engine.engine import Engine, EngineSettings
from paceline.policy.decoder import Decoder
from paceline.stats import RolloutStats
from paceline.types import Completion, Precision, Request

# A rollout's tail: the steps in which at most one in so many of its requests is still running.
TAIL_SHARE = 8


@dataclass(frozen=True)
class RolloutPoint:
    """A whole rollout."""

    requests: int
    tokens: int
    longest: int
    seconds: Spread
    tokens_per_second: float
    first_run_seconds: float
    preemptions: int
    decode_steps: int
    tail_seconds: float  # with at most an eighth of the requests still running
    # Mean step time with at most this many running, and more than the next smaller.
    step_ms_by_running: dict[int, float]
    accept_length: float = 1.0  # tokens emitted per draft, the policy's own included

    def record(self) -> dict:
        return asdict(self)


def bench_rollout(
    policy: Decoder,
    lengths: Lengths,
    prompt_tokens: int,
    max_running: int,
    kv_tokens: int,
    repeats: int,
    deterministic: bool,
    precision: Precision = Precision.BASE,
) -> RolloutPoint:
    """Runs the rollout once to compile, then `repeats` times; `kv_tokens` of 0 is room for all of it."""
    longest = max(lengths.values)
    refuse_beyond_positions(policy.config, prompt_tokens, longest, "--lengths")
    kv_tokens = kv_tokens or sum(lengths.values) + len(lengths.values) * (prompt_tokens + 64)
    settings = EngineSettings(
        max_running=max_running,
        kv_tokens=kv_tokens,
        max_length=prompt_tokens + longest + 2,
        deterministic=deterministic,
        precision=precision,
    )
    requests = bench_requests(list(lengths.values), prompt_tokens, policy.config.vocab_size)
    point = measure_rollouts(Engine(policy, settings), requests, repeats)
    assert point.tokens == sum(lengths.values)
    return point


def measure_rollouts(engine: Engine, requests: list[Request], repeats: int) -> RolloutPoint:
    """Runs the requests once to compile, then `repeats` times, with whatever pacer and drafters there are."""
    unused = without_rates(engine.drafter_state())
    engine.time_steps()
    seconds: list[float] = []
    captured = engine.runner.capture_seconds
    for _ in range(repeats + 1):
        engine.load_drafter_state(unused)
        engine.take_stats()
        engine.preemptions = 0
        start = time.perf_counter()
        engine.submit(requests)
        completed = [_length(completion) for completion in engine.completions()]
        seconds.append(time.perf_counter() - start)
    stats = engine.take_stats()
    # A rollout too long to be run twice counts from its first run, without what capturing graphs took.
    spread = Spread.of(seconds[1:] or [seconds[0] - (engine.runner.capture_seconds - captured)])
    tokens = sum(completed)
    drafts = list(stats.drafts.values())
    return RolloutPoint(
        requests=len(requests),
        tokens=tokens,
        longest=max(completed),
        seconds=spread,
        tokens_per_second=tokens / spread.median,
        first_run_seconds=seconds[0],
        preemptions=engine.preemptions,
        decode_steps=len(stats.running),
        tail_seconds=_tail_seconds(stats, len(requests)),
        step_ms_by_running=step_ms_by_running(stats),
        accept_length=1 + sum(d.accepted for d in drafts) / max(1, sum(d.drafts for d in drafts)),
    )


def _length(completion: Completion) -> int:
    """Returns a response's tokens; raises where the engine refused the request, such as for a small pool."""
    if completion.error:
        raise ValueError(f"request {completion.request.id} was refused: {completion.error}")
    return len(completion.tokens)


def _tail_seconds(stats: RolloutStats, requests: int) -> float:
    steps = zip(stats.step_seconds, stats.running, strict=True)
    return sum(seconds for seconds, running in steps if running * TAIL_SHARE <= requests)


def step_ms_by_running(stats: RolloutStats) -> dict[int, float]:
    """Returns mean times by numbers of running rows; none where prefills between steps blur their times."""
    # One that is negative has left its time to another, of any number of rows.
    if min(stats.step_seconds) < 0:
        return {}
    bounds = [2**i for i in range(max(stats.running).bit_length() + 1)]
    by_bound: dict[int, list[float]] = {}
    for running, seconds in zip(stats.running, stats.step_seconds, strict=True):
        by_bound.setdefault(next(b for b in bounds if running <= b), []).append(seconds * 1e3)
    return {bound: sum(times) / len(times) for bound, times in sorted(by_bound.items())}
