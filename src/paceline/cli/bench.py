"""The `paceline bench` commands."""

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

app = typer.Typer(no_args_is_help=True, help="Measure this machine: medians of repeats, with their spread.")

ModelOption = Annotated[
    str,
    typer.Option(
        help="a folder, FOLDER@8b to widen it, or a named shape with random weights such as qwen3-8b"
    ),
]
CANDIDATES = 4  # requests to choose the longest from, for each one that `speculation` runs
PrecisionOption = Annotated[str, typer.Option(help="bf16, fp8 or fp8+kv")]
JsonOption = Annotated[Optional[Path], typer.Option("--json", help="also write the figures here")]


@app.command()
def decode(
    model: ModelOption = "builtin",
    batches: Annotated[str, typer.Option(help="batch sizes, comma separated")] = "1,8,32,64,128,256",
    prompt: Annotated[int, typer.Option(help="prompt tokens")] = 128,
    new: Annotated[int, typer.Option(help="new tokens")] = 256,
    proposals: Annotated[
        str, typer.Option(help="proposed tokens that each step verifies, comma separated; 0: plain decoding")
    ] = "0",
    repeats: int = 3,
    deterministic: bool = False,
    precision: PrecisionOption = "bf16",
    json_file: JsonOption = None,
) -> None:
    """Time of one decode or verify step by batch size."""
    from paceline.bench.decode import bench_decode
    from paceline.bench.setup import bench_policy, describe
    from paceline.device import best_device, refuse_old_gpu

    device = best_device()
    if device.type == "cuda":
        refuse_old_gpu(precision, "--precision")
    policy = bench_policy(_model(model), device)
    sizes, counts = [int(b) for b in batches.split(",")], [int(k) for k in proposals.split(",")]
    points = bench_decode(policy, sizes, prompt, new, repeats, deterministic, counts, precision)
    typer.echo(
        f"{'batch':>6} {'verified':>8} {'step ms [low, high]':>26} {'tok/s':>9} {'prefill ms':>11} "
        f"{'first run s':>12}"
    )
    for p in points:
        typer.echo(
            f"{p.batch:>6} {p.proposals:>8} {p.step_ms!s:>26} {p.tokens_per_second:>9.0f} "
            f"{p.prefill_ms:>11.1f} {p.first_run_seconds:>12.1f}"
        )
    how = {"model": model, "deterministic": deterministic, "precision": precision}
    _write(json_file, {**how, **describe(device), "points": [p.record() for p in points]})


@app.command()
def rollout(
    model: ModelOption = "builtin",
    requests: int = 256,
    prompt: Annotated[int, typer.Option(help="prompt tokens")] = 128,
    lengths: Annotated[
        str, typer.Option(help="fixed:N or lognormal:MEAN,SIGMA,MIN,MAX")
    ] = "lognormal:512,1.0,16,4096",
    max_running: int = 256,
    kv_tokens: Annotated[int, typer.Option(help="size of the KV pool; 0: no pressure")] = 0,
    repeats: Annotated[
        int,
        typer.Option(
            help="after a first run that compiles; 0: that one counts, without graph captures", min=0
        ),
    ] = 2,
    deterministic: bool = False,
    precision: PrecisionOption = "bf16",
    json_file: JsonOption = None,
) -> None:
    """Time of a whole long-tailed rollout."""
    from paceline.bench.rollout import Lengths, bench_rollout
    from paceline.bench.setup import bench_policy, describe
    from paceline.device import best_device, refuse_old_gpu

    device = best_device()
    if device.type == "cuda":
        refuse_old_gpu(precision, "--precision")
    policy = bench_policy(_model(model), device)
    point = bench_rollout(
        policy,
        Lengths.parse(lengths, requests),
        prompt,
        max_running,
        kv_tokens,
        repeats,
        deterministic,
        precision,
    )
    typer.echo(f"{point.requests} requests, {point.tokens} tokens, longest {point.longest}")
    typer.echo(
        f"{point.seconds} s, {point.tokens_per_second:.0f} tok/s; tail {point.tail_seconds:.2f} s; first run "
        f"{point.first_run_seconds:.1f} s"
    )
    typer.echo(f"{point.decode_steps} steps, {point.preemptions} preemptions")
    typer.echo(
        "mean step ms by running requests: "
        + ", ".join(f"<={n}: {ms:.2f}" for n, ms in point.step_ms_by_running.items())
    )
    _write(
        json_file,
        {
            "model": model,
            "deterministic": deterministic,
            "precision": precision,
            **describe(device),
            "point": point.record(),
        },
    )


@app.command()
def acceptance(
    recipe: Annotated[
        str, typer.Argument(help="whose policy, prompts and sampling settings are measured")
    ] = "default",
    overrides: Annotated[
        Optional[list[str]],
        typer.Argument(help="section.key=value, such as policy.path=FOLDER rollout.max_tokens=256"),
    ] = None,
    draft: Annotated[
        str, typer.Option(help="the draft model's folder; default: the policy with noise on its weights")
    ] = "",
    disturbance: Annotated[
        float, typer.Option(help="without --draft: that noise, in standard deviations of each matrix")
    ] = 0.2,
    tokens: Annotated[int, typer.Option(help="proposed per step", min=1, max=15)] = 3,
    requests: Annotated[int, typer.Option(help="responses that are sampled", min=1)] = 32,
    json_file: JsonOption = None,
) -> None:
    """Shared noise against rejection with the same draft model: expected per token, and realised."""
    from paceline.bench.acceptance import bench_acceptance
    from paceline.bench.setup import bench_policy, describe, recipe_policy, recipe_requests
    from paceline.certify.native import disturbed
    from paceline.config import load_config

    config = load_config(recipe, overrides or [])
    policy, prompts = recipe_policy(config)
    draft_model = bench_policy(_model(draft), policy.device) if draft else disturbed(policy, disturbance)
    p = bench_acceptance(policy, draft_model, recipe_requests(config, prompts, requests), tokens)
    typer.echo(
        f"{p.positions} positions, mean TV {p.mean_tv:.3f}; a greedy draft would be accepted "
        f"{p.greedy_draft:.3f} of the time"
    )
    typer.echo(f"{'':<14}{'expected per token':>20}{'realised per token':>20}{'accept length':>15}")
    typer.echo(
        f"{'rejection':<14}{p.rejection:>20.3f}{p.realised_rejection:>20.3f}{p.accept_length_rejection:>15.2f}"
    )
    typer.echo(
        f"{'shared noise':<14}{p.shared_noise:>20.3f}{p.realised_shared_noise:>20.3f}{p.accept_length_shared_noise:>15.2f}"
    )
    typer.echo(f"shared noise never accepts less than {p.shared_noise_bound:.3f} here")
    drafter = draft or f"the policy disturbed by {disturbance}"
    _write(
        json_file,
        {
            "recipe": recipe,
            "overrides": overrides,
            "draft": drafter,
            "tokens": tokens,
            **describe(policy.device),
            "point": p.record(),
        },
    )


@app.command()
def speculation(
    recipe: Annotated[
        str, typer.Argument(help="whose policy, prompts and sampling settings are measured")
    ] = "default",
    overrides: Annotated[
        Optional[list[str]],
        typer.Argument(help="section.key=value, such as policy.path=FOLDER policy.widen=8b"),
    ] = None,
    drafter: Annotated[
        str, typer.Option(help="history, eagle or draft_model; its folder is rollout.speculation's")
    ] = "eagle",
    batches: Annotated[str, typer.Option(help="batch sizes, comma separated")] = "1,4,16,64",
    tokens: Annotated[
        str, typer.Option(help="proposed tokens per step, comma separated; 0 (plain) is always measured")
    ] = "1,2,3,5,7",
    verify: Annotated[
        str, typer.Option(help="shared-noise, rejection, or both with a comma")
    ] = "shared-noise",
    rounds: Annotated[int, typer.Option(help="requests per row of the batch")] = 3,
    repeats: int = 2,
    json_file: JsonOption = None,
) -> None:
    """Tokens per second with and without speculation, by batch size, on a policy's own responses."""
    from paceline.bench.setup import describe, recipe_engine, recipe_policy, recipe_requests
    from paceline.bench.speculation import bench_speculation, requests_for
    from paceline.config import load_config
    from paceline.drafting.recipe import drafter_overrides
    from paceline.pacing.strategy import Strategy

    config = load_config(recipe, drafter_overrides(overrides or [], [drafter]))
    sizes, counts = [int(b) for b in batches.split(",")], [int(k) for k in tokens.split(",")]
    policy, prompts = recipe_policy(config)
    candidates = recipe_requests(config, prompts, CANDIDATES * requests_for(max(sizes), rounds))
    alone = recipe_engine(config, policy, candidates, max(sizes))
    engines = [
        recipe_engine(config, policy, candidates, max(sizes), drafter, rule) for rule in verify.split(",")
    ]
    typer.echo(
        f"{'batch':>6} {'strategy':>18} {'step ms [low, high]':>26} {'draft':>6} {'accept':>7} "
        f"{'tok/s [low, high]':>24} {'ratio':>6} {'same':>6}"
    )
    points = []
    for p in bench_speculation(
        alone, engines, candidates, sizes, [Strategy(drafter, k) for k in counts], repeats, rounds
    ):
        points.append(p)
        speed = f"{p.tokens_per_second.median:.0f} [{p.tokens_per_second.low:.0f}, {p.tokens_per_second.high:.0f}]"
        costs = f"{p.step_ms!s:>26} {100 * p.draft_share:>5.0f}% {p.accept_length:>7.2f}"
        same = "-" if p.identical is None else f"{100 * p.identical:.0f}%"
        typer.echo(f"{p.batch:>6} {p.strategy:>18} {costs} {speed:>24} {p.ratio:>6.2f} {same:>6}")
    _write(
        json_file,
        {
            "recipe": recipe,
            "overrides": overrides,
            **describe(policy.device),
            "points": [p.record() for p in points],
        },
    )


@app.command()
def pacing(
    model: ModelOption = "builtin",
    requests: int = 256,
    prompt: Annotated[int, typer.Option(help="prompt tokens")] = 128,
    lengths: Annotated[
        str, typer.Option(help="fixed:N or lognormal:MEAN,SIGMA,MIN,MAX")
    ] = "lognormal:512,1.0,16,4096",
    acceptance: Annotated[
        str, typer.Option(help="of the drafter, by depth, comma separated; the last one is repeated")
    ] = "0.8,0.78,0.76,0.74,0.7",
    draft_megabytes: Annotated[
        int,
        typer.Option(
            help="weights that the drafter reads per proposed token; an EAGLE head for 8B has about 650"
        ),
    ] = 0,
    tokens: Annotated[
        str, typer.Option(help="proposed tokens per step to measure as fixed strategies, comma separated")
    ] = "1,3,7",
    max_tokens: Annotated[int, typer.Option(help="the most that the pacer may choose")] = 15,
    rollouts: Annotated[int, typer.Option(help="with the pacer; the first starts from nothing")] = 2,
    graph_memory_gb: Annotated[float, typer.Option(help="budget for captured steps")] = 2.0,
    page: Annotated[Optional[Path], typer.Option(help="write the last paced rollout as an HTML page")] = None,
    json_file: JsonOption = None,
) -> None:
    """A long-tailed rollout with plain decoding, fixed strategies and the pacer. The drafter is synthetic: it
    has seen the answers and spoils them to the acceptance asked for.
    """
    from paceline.bench.oracle import OracleDrafter
    from paceline.bench.pacing import PacingPoint, bench_pacing
    from paceline.bench.rollout import Lengths
    from paceline.bench.setup import bench_policy, bench_requests, describe
    from paceline.device import best_device
    from paceline.engine.engine import Engine, EngineSettings
    from paceline.engine.factory import counts_up_to
    from paceline.pacing.adaptive import AdaptivePacer, PacingSettings
    from paceline.pacing.strategy import Strategy
    from paceline.report.pace_page import render

    device = best_device()
    policy = bench_policy(_model(model), device)
    sizes = Lengths.parse(lengths, requests).values
    wanted = bench_requests(list(sizes), prompt, policy.config.vocab_size)
    rates = [float(a) for a in acceptance.split(",")]
    oracle = OracleDrafter(wanted, rates, draft_megabytes * 1_000_000)
    kv_tokens, longest = sum(sizes) + requests * (prompt + 64 + 256), prompt + max(sizes) + 2
    settings = EngineSettings(
        requests, kv_tokens, max_length=longest, deterministic=True, graph_memory=int(graph_memory_gb * 1e9)
    )
    engine = Engine(policy, settings, drafters=[oracle])
    strategies = tuple(Strategy(oracle.name, count) for count in counts_up_to(max_tokens))
    pacer = AdaptivePacer(PacingSettings(tuple(engine.buckets), strategies))
    typer.echo(
        f"synthetic drafter: right with probability {acceptance} by depth, {draft_megabytes} MB read per "
        "token; deterministic mode"
    )
    typer.echo(
        f"{'strategy':>12} {'seconds':>9} {'captures s':>11} {'steps':>7} {'accept':>7} {'same':>6} "
        f"{'pool GB':>8} {'graphs':>7}"
    )

    def show(p: PacingPoint) -> None:
        typer.echo(
            f"{p.name:>12} {p.seconds:>9.3f} {p.capture_seconds:>11.2f} {p.decode_steps:>7} "
            f"{p.accept_length:>7.2f} {100 * p.identical:>5.0f}% "
            f"{p.pool_gb:>8.2f} {p.graphs:>7}"
        )

    result = bench_pacing(
        engine,
        wanted,
        [Strategy(oracle.name, int(k)) for k in tokens.split(",")],
        pacer,
        rollouts,
        oracle.learn,
        show,
    )
    best, paced = result.best_fixed, result.paced
    typer.echo(
        f"{result.requests} requests, {result.tokens} tokens, longest {result.longest}; paced "
        f"{result.plain.seconds / paced.seconds:.2f}x plain, "
        f"{best.seconds / paced.seconds:.3f}x the best fixed ({best.name})"
    )
    if page is not None:
        page.write_text(render(f"bench pacing, {model}", rollouts, result.trace))
    figures = {"model": model, "acceptance": rates, "draft_megabytes": draft_megabytes, **describe(device)}
    _write(json_file, {**figures, "points": [p.record() for p in result.points]})


def _model(name: str) -> str:
    from paceline.models.source import BUILTIN_POLICIES

    folder, at, shape = name.partition("@")
    return f"{BUILTIN_POLICIES.get(folder, folder)}{at}{shape}"


def _write(path: Path | None, figures: dict) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")
