"""Tokens per second at a constant batch, by the number of proposed tokens.

    python -m benchmarks.speculation chain-sum policy.path=FOLDER rollout.speculation.eagle_path=HEAD \\
        --batches 1,4,16,64 --tokens 1,3,7

Real prompts and real responses: acceptance on random weights means nothing. Only steps that replay the whole
batch's graph count (it also serves a batch that has lost a few), and only those that no prefill or capture
disturbs, so requests whose responses are long are chosen: they are also the ones that speculation is for.

Each strategy generates the same requests with the same seeds, so the share of completions that are plain
decoding's can be reported: all of them in deterministic mode and on a CPU; in the fast GPU mode kernels round
differently at different sizes. Rejection samples the same distribution, not the same tokens: its responses,
and so the requests with long ones, are others. The recipe says in which precision everything runs, plain
decoding included, and whether proposals are chains or trees.

Drafters are reset before each of them: one that remembers responses would find these very ones.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

import torch

from benchmarks.probe import MOST_PROPOSALS, MOST_ROWS, add_recipe, make_parser, numbers, write_json
from paceline.bench.recipe import rollout_config
from paceline.bench.recipe_rollout import rollout_engine
from paceline.bench.setup import recipe_policy, recipe_requests
from paceline.bench.spread import Spread
from paceline.config import Config, ConfigError
from paceline.drafting.recipe import drafter_overrides
from paceline.engine.drafters import without_rates
from paceline.engine.engine import Engine
from paceline.engine.sampling import Verify
from paceline.pacing.strategy import PLAIN, FixedPacer, Observation, Strategy
from paceline.policy.decoder import Decoder
from paceline.types import Completion, Request

DrafterState = dict[str, torch.Tensor]
# A small batch gets more rounds, because acceptance is estimated from what it generates.
MIN_REQUESTS = 8
HEADER = (
    f"{'batch':>6} {'strategy':>18} {'step ms [low, high]':>26} {'draft':>6} {'accept':>7} "
    f"{'tok/s [low, high]':>24} {'ratio':>6} {'same':>6}"
)
CANDIDATES = 4  # requests to choose the longest from, for each one that runs


@dataclass(frozen=True)
class SpeculationPoint:
    """One strategy at one batch size."""

    batch: int
    strategy: str
    step_ms: Spread  # over repeats, the median step
    draft_share: float  # of the step
    accept_length: float  # tokens emitted per row and step, the policy's own included
    accepted_at: tuple[float, ...]  # share of drafts whose token i was accepted
    tokens_per_second: Spread
    ratio: float  # to plain decoding at the same batch
    identical: float | None  # share of completions equal to plain decoding's, where they should be


def requests_for(batch: int, rounds: int) -> int:
    return max(batch * rounds, MIN_REQUESTS)


def choose_long(
    engine: Engine, candidates: list[Request], count: int, strategy: Strategy = PLAIN
) -> list[Request]:
    """Returns the `count` candidates whose responses are longest, longest first."""
    if len(candidates) < count:
        raise ValueError(f"{count} requests are wanted; there are {len(candidates)} to choose from")
    engine.pacer = FixedPacer(strategy)
    engine.submit(candidates)
    lengths = {completion.request.id: len(completion.tokens) for completion in engine.completions()}
    return sorted(candidates, key=lambda request: -lengths[request.id])[:count]


def bench_recipe(
    config: Config,
    policy: Decoder,
    prompts: list[tuple[int, ...]],
    drafter: str,
    batches: list[int],
    counts: list[int],
    rules: list[str],
    repeats: int,
    rounds: int,
) -> Iterator[SpeculationPoint]:
    """Yields the points of a recipe's policy on its own task.

    `counts` are numbers of proposed tokens, `rules` ways to verify them.
    """
    tree = config.rollout.speculation.shape == "tree"
    if tree and Verify.REJECTION in rules:
        raise ConfigError(
            "--verify rejection: rollout.speculation.shape = 'tree' is verified by shared noise only; "
            "leave one of the two out"
        )
    candidates = recipe_requests(config, prompts, CANDIDATES * requests_for(max(batches), rounds))
    alone = speculating_engine(config, policy, candidates, max(batches), [], Verify.SHARED_NOISE)
    engines = [
        speculating_engine(config, policy, candidates, max(batches), [drafter], rule) for rule in rules
    ]
    strategies = [Strategy(drafter, count, tree) for count in counts]
    yield from bench_speculation(alone, engines, candidates, batches, strategies, repeats, rounds)


def speculating_engine(
    config: Config, policy: Decoder, requests: list[Request], rows: int, drafters: list[str], verify: str
) -> Engine:
    """Returns the recipe's engine with these drafters, this way to verify and so many rows."""
    chosen = {"drafters": drafters, "pacing": "fixed", "verify": verify, "tokens": MOST_PROPOSALS}
    speculation = config.rollout.speculation.model_copy(update=chosen)
    rollout = config.rollout.model_copy(update={"max_running": rows, "speculation": speculation})
    return rollout_engine(config.model_copy(update={"rollout": rollout}), policy, requests)


def bench_speculation(
    alone: Engine,
    engines: list[Engine],
    candidates: list[Request],
    batches: list[int],
    strategies: list[Strategy],
    repeats: int,
    rounds: int,
) -> Iterator[SpeculationPoint]:
    """Yields point by point.

    Ratios are to plain decoding on `alone`, which has no drafter; the first of `engines` (they differ in how
    they verify) also decodes plainly, because a drafter that follows the policy costs a little even then.
    """
    unused = [_copied(without_rates(engine.drafter_state())) for engine in engines]
    most = requests_for(max(batches), rounds)
    strategies = [strategy for strategy in strategies if strategy.count]
    long = choose_long(alone, candidates, most)
    # Where tokens depend on proposals, so do the long responses. Those of a drafter that remembers depend on
    # the batch too, so there this is a guess.
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
                requests = long_by.get((i, strategy), long)[:count]
                runs = _runs(engine, state, requests, batch, strategy, repeats)
                yield _point(batch, _name(engine, strategy), runs, plain, _same_tokens(engine))


def _name(engine: Engine, strategy: Strategy) -> str:
    name = str(strategy) if strategy.count else "plain, drafter on"
    return name if _same_tokens(engine) else f"{name} {engine.settings.verify}"


def _same_tokens(engine: Engine) -> bool:
    return engine.settings.verify == Verify.SHARED_NOISE


class RecordingPacer(FixedPacer):
    """Always chooses the same strategy, and keeps what was observed."""

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


def _copied(state: DrafterState) -> DrafterState:
    return {name: tensor.clone() for name, tensor in state.items()}


def _runs(
    engine: Engine,
    unused: DrafterState,
    requests: list[Request],
    batch: int,
    strategy: Strategy,
    repeats: int,
) -> list[_Run]:
    """Runs `repeats` times from `unused`, the drafters' state before they saw any of the requests."""
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
    smaller = max((bucket for bucket in engine.launcher.buckets if bucket < batch), default=0)
    whole = [
        o
        for o in pacer.observations
        if o.running > smaller and (o.drafts == o.running or not strategy.count) and o.tokens >= o.running
    ]
    full = [o for o in whole if o.decision.strategy == strategy and not o.disturbed]
    if not full:
        seen = f"{len(pacer.observations)} steps, {len(whole)} with that batch"
        raise ValueError(
            f"no undisturbed step with {batch} requests running ({seen}): "
            "responses are too short for this batch, or it does not fit"
        )
    step = statistics.median(o.seconds for o in full)
    accept_length = sum(o.tokens for o in full) / sum(o.running for o in full)
    drafts = sum(o.drafts for o in full)
    accepted_at = (
        tuple(sum(at) / drafts for at in zip_longest(*(o.accepted_at for o in full), fillvalue=0))
        if drafts
        else ()
    )
    draft_share = sum(o.draft_seconds for o in full) / sum(o.seconds for o in full)
    return _Run(
        step * 1e3, draft_share, accept_length, accepted_at, batch * accept_length / step, completions
    )


def _generate(
    engine: Engine, requests: list[Request], batch: int, pacer: RecordingPacer
) -> dict[str, Completion]:
    """Generates a batch at a time, so that prefills come before its steps and not between them."""
    engine.pacer = pacer
    done = {}
    for start in range(0, len(requests), batch):
        engine.submit(requests[start : start + batch])
        done |= {completion.request.id: completion for completion in engine.completions()}
    return done


def _point(
    batch: int, name: str, runs: list[_Run], plain: list[_Run], same_tokens: bool = True
) -> SpeculationPoint:
    speed = Spread.of([run.tokens_per_second for run in runs])
    plain_speed = Spread.of([run.tokens_per_second for run in plain])
    expected = plain[0].completions
    last = runs[-1]
    identical = None
    if same_tokens:
        identical = statistics.mean(
            completion.tokens == expected[id].tokens for id, completion in last.completions.items()
        )
    return SpeculationPoint(
        batch,
        name,
        step_ms=Spread.of([run.step_ms for run in runs]),
        draft_share=last.draft_share,
        accept_length=last.accept_length,
        accepted_at=last.accepted_at,
        tokens_per_second=speed,
        ratio=speed.median / plain_speed.median,
        identical=identical,
    )


def speculation_line(p: SpeculationPoint) -> str:
    tokens = p.tokens_per_second
    speed = f"{tokens.median:.0f} [{tokens.low:.0f}, {tokens.high:.0f}]"
    costs = f"{p.step_ms!s:>26} {100 * p.draft_share:>5.0f}% {p.accept_length:>7.2f}"
    same = "-" if p.identical is None else f"{100 * p.identical:.0f}%"
    return f"{p.batch:>6} {p.strategy:>18} {costs} {speed:>24} {p.ratio:>6.2f} {same:>6}"


def main() -> None:
    parser = make_parser(__doc__)
    add_recipe(parser, "default")
    parser.add_argument(
        "--drafter", default="eagle", help="history, eagle or draft_model; its folder is the recipe's"
    )
    parser.add_argument("--batches", type=numbers(1, MOST_ROWS), default="1,4,16,64")
    parser.add_argument("--tokens", type=numbers(0, MOST_PROPOSALS), default="1,2,3,5,7")
    parser.add_argument("--verify", default="shared-noise", help="shared-noise, rejection, or both")
    parser.add_argument("--rounds", type=int, default=3, help="requests per row of the batch")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_intermixed_args()
    config = rollout_config(options.recipe, drafter_overrides(options.overrides, [options.drafter]))
    policy, prompts = recipe_policy(config)
    rules = [str(Verify(name)) for name in options.verify.split(",")]
    print(HEADER)
    points = []
    sizes = options.batches, options.tokens, rules, options.repeats, options.rounds
    for point in bench_recipe(config, policy, prompts, options.drafter, *sizes):
        points.append(point)
        print(speculation_line(point), flush=True)
    how = {"recipe": options.recipe, "overrides": options.overrides}
    write_json(options.json, how, policy.device, points)


if __name__ == "__main__":
    main()
