"""`paceline bench speculation`: tokens per second at a constant batch, by drafter and number of proposed
tokens.

Real prompts and real responses: acceptance on random weights means nothing. Only steps that replay the whole
batch's graph count (it also serves a batch that has lost a few), and only those that no prefill or capture
disturbs, so requests whose responses are long are chosen: they are also the ones that speculation is for.

Each strategy generates the same requests with the same seeds, so the share of completions that are plain
decoding's can be reported: all of them in deterministic mode and on a CPU; in the fast GPU mode kernels round
differently at different sizes. Rejection samples the same distribution, not the same tokens: its responses,
and so the requests with long ones, are others.

Before each of them drafters forget what they have seen: one that remembers responses would find these very
ones.
"""

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from paceline.bench.spread import Spread
from paceline.engine.engine import Engine
from paceline.engine.sampling import Verify
from paceline.pacing.strategy import PLAIN, FixedPacer, Observation, Strategy
from paceline.types import Completion, Request

DrafterState = dict[str, torch.Tensor]
MIN_REQUESTS = 8  # a small batch gets more rounds, because acceptance is estimated from what it generates


@dataclass(frozen=True)
class SpeculationPoint:
    batch: int
    strategy: str
    step_ms: Spread  # over repeats, the median step
    draft_share: float  # of the step
    accept_length: float  # tokens emitted per row and step, the policy's own included
    accepted_at: tuple[float, ...]  # share of drafts whose first i + 1 tokens were all accepted
    tokens_per_second: Spread
    ratio: float  # to plain decoding at the same batch
    identical: float | None  # share of completions equal to plain decoding's, where they should be

    def record(self) -> dict:
        return asdict(self)


def requests_for(batch: int, rounds: int) -> int:
    return max(batch * rounds, MIN_REQUESTS)


def choose_long(
    engine: Engine, candidates: list[Request], count: int, strategy: Strategy = PLAIN
) -> list[Request]:
    """Those whose responses are longest, longest first."""
    if len(candidates) < count:
        raise ValueError(f"{count} requests are wanted; there are {len(candidates)} to choose from")
    engine.pacer = FixedPacer(strategy)
    engine.submit(candidates)
    lengths = {completion.request.id: len(completion.tokens) for completion in engine.completions()}
    return sorted(candidates, key=lambda request: -lengths[request.id])[:count]


def bench_speculation(
    alone: Engine,
    engines: list[Engine],
    candidates: list[Request],
    batches: list[int],
    strategies: list[Strategy],
    repeats: int,
    rounds: int,
) -> Iterator[SpeculationPoint]:
    """Point by point. Ratios are to plain decoding on `alone`, which has no drafter; the first of `engines`
    (they differ in how they verify) also decodes plainly, because a drafter that follows the policy costs
    a little even then.
    """
    unused = [_kept_apart(engine.drafter_state()) for engine in engines]
    most, strategies = (
        requests_for(max(batches), rounds),
        [strategy for strategy in strategies if strategy.count],
    )
    long = choose_long(alone, candidates, most)
    # where tokens depend on proposals; those of a drafter that remembers depend on the batch too, so there
    # this is a guess
    long_by = {}
    for i, engine in enumerate(engines):
        for strategy in strategies if not _same_tokens(engine) else []:
            engine.load_drafter_state(unused[i])
            long_by[i, strategy] = choose_long(engine, candidates, most, strategy)
    for batch in batches:
        count = requests_for(batch, rounds)
        plain = _runs(alone, {}, long[:count], batch, PLAIN, repeats)
        yield _point(batch, "plain", plain, plain)
        for i, (engine, state) in enumerate(zip(engines, unused, strict=True)):
            for strategy in [*([PLAIN] if i == 0 else []), *strategies]:
                name = str(strategy) if strategy.count else "plain, seated"
                if not _same_tokens(engine):
                    name = f"{name} {engine.settings.verify}"
                requests = long_by.get((i, strategy), long)[:count]
                yield _point(
                    batch,
                    name,
                    _runs(engine, state, requests, batch, strategy, repeats),
                    plain,
                    _same_tokens(engine),
                )


def _same_tokens(engine: Engine) -> bool:
    return engine.settings.verify == Verify.SHARED_NOISE


class RecordingPacer(FixedPacer):
    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self.observations: list[Observation] = []

    def observe(self, observation: Observation) -> None:
        self.observations.append(observation)


@dataclass(frozen=True)
class _Run:
    step_ms: float
    draft_share: float
    accept_length: float
    accepted_at: tuple[float, ...]
    tokens_per_second: float
    completions: dict[str, Completion]


def _kept_apart(state: DrafterState) -> DrafterState:
    return {name: tensor.clone() for name, tensor in state.items()}


def _runs(
    engine: Engine,
    unused: DrafterState,
    requests: list[Request],
    batch: int,
    strategy: Strategy,
    repeats: int,
) -> list[_Run]:
    """`unused`: the drafters' state before they saw any of the requests."""
    _generate(engine, requests[:batch], batch, RecordingPacer(strategy))  # compiles and captures
    return [_run(engine, unused, requests, batch, strategy) for _ in range(repeats)]


def _run(
    engine: Engine, unused: DrafterState, requests: list[Request], batch: int, strategy: Strategy
) -> _Run:
    engine.load_drafter_state(unused)
    pacer = RecordingPacer(strategy)
    completions = _generate(engine, requests, batch, pacer)
    # The host runs ahead of what it reads: steps launched before it saw a row end carry that row without a
    # token.
    smaller = max((bucket for bucket in engine.buckets if bucket < batch), default=0)
    whole = [
        o
        for o in pacer.observations
        if o.running > smaller and (o.drafts == o.running or not strategy.count) and o.tokens >= o.running
    ]
    full = [o for o in whole if o.decision.strategy == strategy and not o.disturbed]
    if not full:
        seen = f"{len(pacer.observations)} steps, {len(whole)} with that batch"
        raise ValueError(
            f"no undisturbed step with {batch} requests running ({seen}): responses are too short for this "
            "batch, or it does not fit"
        )
    step = statistics.median(o.seconds for o in full)
    accept_length = sum(o.tokens for o in full) / sum(o.running for o in full)
    drafts = sum(o.drafts for o in full)
    accepted_at = (
        tuple(sum(o.accepted_at[i] for o in full) / drafts for i in range(strategy.count)) if drafts else ()
    )
    draft_share = sum(o.draft_seconds for o in full) / sum(o.seconds for o in full)
    return _Run(
        step * 1e3, draft_share, accept_length, accepted_at, batch * accept_length / step, completions
    )


def _generate(
    engine: Engine, requests: list[Request], batch: int, pacer: RecordingPacer
) -> dict[str, Completion]:
    """A batch at a time, so that prefills come before its steps and not between them."""
    engine.pacer = pacer
    done = {}
    for start in range(0, len(requests), batch):
        engine.submit(requests[start : start + batch])
        done |= {completion.request.id: completion for completion in engine.completions()}
    return done


def _point(
    batch: int, name: str, runs: list[_Run], plain: list[_Run], same_tokens: bool = True
) -> SpeculationPoint:
    speed, reference = (
        Spread.of([run.tokens_per_second for run in runs]),
        Spread.of([run.tokens_per_second for run in plain]),
    )
    expected, last = plain[0].completions, runs[-1]
    identical = None
    if same_tokens:
        identical = statistics.mean(
            completion.tokens == expected[id].tokens for id, completion in last.completions.items()
        )
    return SpeculationPoint(
        batch,
        name,
        Spread.of([run.step_ms for run in runs]),
        last.draft_share,
        last.accept_length,
        last.accepted_at,
        speed,
        speed.median / reference.median,
        identical,
    )
