"""`paceline bench speculation`: tokens per second at a constant batch, by drafter and number of proposed tokens.

Real prompts, real lengths: acceptance on random weights means nothing. The batch is kept full by requests that wait, and only
steps with a full batch count; a first batch, which compiles and captures, does not. Each strategy generates the same
requests with the same seeds, so the share of identical completions can be reported: all of them in deterministic mode and on a
CPU; in the fast GPU mode kernels round differently at different sizes.
"""

from dataclasses import asdict, dataclass

from paceline.bench.spread import Spread
from paceline.engine.engine import Engine
from paceline.pacing.strategy import PLAIN, FixedPacer, Strategy
from paceline.types import Completion, Request

MIN_REQUESTS = 8


@dataclass(frozen=True)
class SpeculationPoint:
    batch: int
    strategy: str
    step_ms: Spread  # over repeats, the median full-batch step
    accept_length: float  # tokens emitted per row and step, the policy's own included
    accepted_at: tuple[float, ...]  # share of drafts whose first i + 1 tokens were all accepted
    tokens_per_second: Spread  # of full-batch steps
    ratio: float  # to plain decoding at the same batch
    identical: float  # share of completions equal to plain decoding's

    def record(self) -> dict:
        return asdict(self)


def bench_speculation(
    alone: Engine, engines: list[Engine], requests: list[Request], batches: list[int], strategies: list[Strategy], repeats: int, rounds: int = 3
) -> list[SpeculationPoint]:
    """`rounds` requests per row of the batch, in order. Ratios are to plain decoding on `alone`, which has no drafter; each of
    `engines` (they differ in how they verify) also decodes plainly, because a drafter that follows the policy costs a little even then."""
    points = []
    for batch in batches:
        count = requests_for(batch, rounds)
        if len(requests) < count:
            raise ValueError(f"a batch of {batch} wants {count} requests; there are {len(requests)}")
        wanted = requests[:count]
        plain = _runs(alone, wanted, batch, PLAIN, repeats)
        points.append(_point(batch, "plain", plain, plain))
        for number, engine in enumerate(engines):
            for strategy in [*([PLAIN] if number == 0 else []), *(s for s in strategies if s.count)]:
                runs = _runs(engine, wanted, batch, strategy, repeats)
                name = str(strategy) if strategy.count else "plain, seated"
                points.append(_point(batch, name if engine.settings.verify == "shared-noise" else f"{name} {engine.settings.verify}", runs, plain))
    return points


def requests_for(batch: int, rounds: int) -> int:
    """A small batch gets more rounds, because acceptance is estimated from what it generates."""
    return max(batch * rounds, MIN_REQUESTS)


@dataclass(frozen=True)
class _Run:
    step_ms: float
    tokens_per_second: float
    accept_length: float
    accepted_at: tuple[float, ...]
    completions: dict[str, Completion]


def _runs(engine: Engine, requests: list[Request], batch: int, strategy: Strategy, repeats: int) -> list[_Run]:
    _run(engine, requests[:batch], batch, strategy)  # compiles and captures
    return [_run(engine, requests, batch, strategy) for _ in range(repeats)]


def _run(engine: Engine, requests: list[Request], batch: int, strategy: Strategy) -> _Run:
    """The engine takes `batch` requests at a time: the others are submitted as these finish."""
    engine.pacer = FixedPacer(strategy, batch)
    engine.take_stats()
    waiting, done = list(requests[batch:]), {}
    engine.submit(requests[:batch])
    for completion in engine.completions():
        done[completion.request.id] = completion
        if waiting:
            engine.submit([waiting.pop(0)])
    stats = engine.take_stats()
    full = sorted(
        seconds
        for seconds, running, ran in zip(stats.step_seconds, stats.running, stats.strategies, strict=True)
        if running == batch and ran == str(strategy)
    )
    step = full[len(full) // 2]  # a step that waited for a prefill is no step of this strategy
    drafts = stats.drafts.get(strategy.drafter)
    accept_length = drafts.accept_length if drafts else 1.0
    accepted_at = tuple(count / drafts.drafts for count in drafts.accepted_at) if drafts else ()
    return _Run(step * 1e3, batch * accept_length / step, accept_length, accepted_at, done)


def _point(batch: int, name: str, runs: list[_Run], plain: list[_Run]) -> SpeculationPoint:
    speed, reference = Spread.of([run.tokens_per_second for run in runs]), Spread.of([run.tokens_per_second for run in plain])
    expected = plain[0].completions
    same = sum(completion.tokens == expected[name].tokens for name, completion in runs[0].completions.items())
    last = runs[-1]
    return SpeculationPoint(
        batch, name, Spread.of([run.step_ms for run in runs]), last.accept_length, last.accepted_at, speed,
        speed.median / reference.median, same / len(expected),
    )  # fmt: skip
