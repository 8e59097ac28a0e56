"""One long-tailed rollout plainly, with each fixed strategy, and with the pacer.

    python -m benchmarks.pacing countdown policy.path=FOLDER rollout.speculation.eagle_path=HEAD --tokens 3,7
    python -m benchmarks.pacing --model qwen3-8b --draft-megabytes 650

With a recipe these are its policy, prompts, drafters, precision and lengths. Without one the drafter is
synthetic (`oracle.py`): it has seen the answers and spoils them to the acceptance asked for.

Same requests, same seeds, and in deterministic mode the same tokens, which is checked. A token of each
request comes first, so that no strategy is charged for compiling the prefill. Graphs are captured when first
needed; their time is taken out of a rollout's seconds and reported beside it, because a run captures once and
rolls out often. The pacer runs twice or more: first with only a second of step timings before it, then with
what it has learnt, as from the second step of an RL run onwards.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from benchmarks.oracle import OracleDrafter
from benchmarks.probe import MODEL_HELP, MOST_PROPOSALS, add_recipe, make_parser, numbers, write_json
from benchmarks.timing import timed
from paceline.bench.lengths import Lengths
from paceline.bench.recipe import rollout_config
from paceline.bench.recipe_rollout import rollout_engine
from paceline.bench.setup import (
    bench_policy,
    bench_requests,
    recipe_policy,
    recipe_requests,
    refuse_beyond_positions,
)
from paceline.config import Config, ConfigError
from paceline.device import best_device
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

HEADER = (
    f"{'strategy':>12} {'seconds':>9} {'captures s':>11} {'steps':>7} {'accept':>7} {'same':>6} "
    f"{'pool GB':>8} {'graphs':>7}"
)


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
    trial_steps: float = 0.0  # share of the steps that were trials
    trial_seconds: float = 0.0  # and of their time
    stages: list[Stage] = field(default_factory=list)


@dataclass(frozen=True)
class PacingResult:
    """All rollouts: plain decoding first, then the fixed strategies, then the pacer."""

    requests: int
    tokens: int
    longest: int
    points: list[PacingPoint]

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


def bench_recipe(
    config: Config,
    policy: Decoder,
    prompts: list[tuple[int, ...]],
    requests: int,
    fixed_tokens: list[int],
    rollouts: int,
    progress: Callable[[PacingPoint], None],
) -> PacingResult:
    """Runs `bench_pacing` with a recipe's own drafters and pacer."""
    wanted = recipe_requests(config, prompts, requests)
    engine = rollout_engine(config, policy, wanted)
    speculation = config.rollout.speculation
    if not isinstance(engine.pacer, AdaptivePacer):
        raise ConfigError(
            f"rollout.speculation.drafters = {speculation.drafters}, pacing = {speculation.pacing!r}: an "
            "adaptive pacer is measured; name drafters that this policy has with "
            "rollout.speculation.pacing=adaptive, or use `paceline bench rollout`"
        )
    fixed = [
        Strategy(drafter.name, count, speculation.shape == "tree")
        for drafter in engine.drafters.values()
        for count in fixed_tokens
        if count <= min(drafter.max_tokens, speculation.tokens)
    ]
    return bench_pacing(engine, wanted, fixed, engine.pacer, rollouts, progress=progress)


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
    for name, chosen in [*((str(strategy), FixedPacer(strategy)) for strategy in fixed), *paced]:
        # What a run does before its first step: it is not the rollout's.
        engine.pacer = chosen
        engine.time_steps()
        rollout = _Rollout.run(engine, unused, requests, chosen)
        points.append(_point(name, rollout, plain, engine))
        progress(points[-1])
    lengths = [len(completion.tokens) for completion in plain.completions.values()]
    return PacingResult(len(requests), sum(lengths), max(lengths), points)


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

        def roll_out() -> dict[str, Completion]:
            engine.submit(requests)
            return {completion.request.id: completion for completion in engine.completions()}

        seconds, completions = timed(roll_out, engine.policy.device)
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


def show(p: PacingPoint) -> None:
    print(
        f"{p.name:>12} {p.seconds:>9.3f} {p.capture_seconds:>11.2f} {p.decode_steps:>7} "
        f"{p.accept_length:>7.2f} {100 * p.identical:>5.0f}% {p.pool_gb:>8.2f} {p.graphs:>7}",
        flush=True,
    )


def parse_options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_recipe(parser, "")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument(
        "--tokens", type=numbers(1, MOST_PROPOSALS), default="1,3,7", help="of each fixed strategy"
    )
    parser.add_argument("--rollouts", type=int, default=2, help="with the pacer; the first knows nothing")
    synthetic = parser.add_argument_group("without a recipe")
    synthetic.add_argument("--model", default="builtin", help=MODEL_HELP)
    synthetic.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    synthetic.add_argument("--lengths", default="lognormal:512,1.0,16,4096")
    synthetic.add_argument("--acceptance", default="0.8,0.78,0.76,0.74,0.7", help="of the drafter, by depth")
    synthetic.add_argument(
        "--draft-megabytes",
        type=int,
        default=0,
        help="that the drafter reads per token; an EAGLE head for 8B has about 650",
    )
    synthetic.add_argument("--max-tokens", type=int, default=MOST_PROPOSALS, help="that the pacer may choose")
    synthetic.add_argument("--graph-memory-gb", type=float, default=2.0, help="budget for captured steps")
    return parser.parse_intermixed_args()


def main() -> None:
    options = parse_options()
    print(HEADER)
    if options.recipe:
        config = rollout_config(options.recipe, options.overrides)
        policy, prompts = recipe_policy(config)
        result = bench_recipe(
            config, policy, prompts, options.requests, options.tokens, options.rollouts, show
        )
    else:
        policy = bench_policy(options.model, best_device())
        settings = SyntheticPacing(
            lengths=Lengths.parse(options.lengths, options.requests).values,
            prompt_tokens=options.prompt,
            acceptance=tuple(float(rate) for rate in options.acceptance.split(",")),
            draft_bytes=options.draft_megabytes * 1_000_000,
            fixed_tokens=tuple(options.tokens),
            max_tokens=options.max_tokens,
            rollouts=options.rollouts,
            graph_memory=int(options.graph_memory_gb * 1e9),
        )
        result = bench_synthetic(policy, settings, show)
    best, paced = result.best_fixed, result.paced
    print(
        f"{result.requests} requests, {result.tokens} tokens, longest {result.longest}; "
        f"paced {result.plain.seconds / paced.seconds:.2f}x plain, "
        f"{best.seconds / paced.seconds:.3f}x the best fixed ({best.name})"
    )
    how = {key: value for key, value in vars(options).items() if key != "json"}
    write_json(options.json, how, policy.device, result.points)


if __name__ == "__main__":
    main()
