"""The `paceline bench` commands: options in, one call of `bench/`, figures out."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from paceline.cli import bench_tables as tables
from paceline.cli.bench_options import (
    MOST_PROPOSALS,
    MOST_RUNNING,
    BatchesOption,
    JsonOption,
    LengthsOption,
    ModelOption,
    OverridesArgument,
    OwnRecipeArgument,
    PrecisionOption,
    PromptOption,
    RecipeArgument,
    RepeatsOption,
    RequestsOption,
    bench_device,
    parse_batches,
    parse_choices,
    parse_numbers,
    parse_shares,
    refuse_beside_recipe,
    say_lines,
    write_figures,
)
from paceline.cli.bench_training import learn, memory, step
from paceline.cli.options import QuietOption, in_range, parse_precision, split_recipe
from paceline.cli.progress import announce, working
from paceline.config.section import MOST_GB

if TYPE_CHECKING:
    pass

app = typer.Typer(no_args_is_help=True, help="Measure this machine: medians of repeats, with their spread.")

for command in (step, learn, memory):
    app.command()(command)

LONG_TAIL = "lognormal:512,1.0,16,4096"


@app.callback()
def bench(context: typer.Context, quiet: QuietOption = False) -> None:
    """Measure this machine: medians of repeats, with their spread."""
    if "--help" in sys.argv:
        return
    name = context.invoked_subcommand
    announce(f"bench {name}: measures this machine; prints figures, and writes them where --json says", quiet)
    context.with_resource(working(f"bench {name}", quiet))


@app.command()
def decode(
    model: ModelOption = "builtin",
    batches: BatchesOption = "1,8,32,64,128,256",
    prompt: PromptOption = 128,
    new: Annotated[int, typer.Option(help="new tokens", callback=in_range(1))] = 256,
    proposals: Annotated[
        str, typer.Option(help="proposed tokens that each step verifies, comma separated; 0: plain decoding")
    ] = "0",
    repeats: RepeatsOption = 3,
    deterministic: bool = False,
    precision: PrecisionOption = "base",
    json_file: JsonOption = None,
) -> None:
    """Time of one decode or verify step by batch size."""
    from paceline.bench.decode import bench_decode
    from paceline.bench.setup import bench_policy, describe

    sizes, counts = parse_batches(batches), parse_numbers("--proposals", proposals, 0, MOST_PROPOSALS)
    rollout_precision = parse_precision(precision)
    device = bench_device(rollout_precision)
    policy = bench_policy(model, device)
    points = bench_decode(
        policy,
        sizes,
        prompt,
        new,
        repeats,
        deterministic,
        counts,
        rollout_precision,
    )
    say_lines(tables.decode_lines(points))
    how = {"model": model, "deterministic": deterministic, "precision": str(rollout_precision)}
    write_figures(json_file, {**how, **describe(device), "points": [p.record() for p in points]})


@app.command()
def rollout(
    context: typer.Context,
    recipe: OwnRecipeArgument = "",
    overrides: OverridesArgument = None,
    model: ModelOption = "builtin",
    requests: RequestsOption = 256,
    prompt: PromptOption = 128,
    lengths: LengthsOption = LONG_TAIL,
    max_running: Annotated[int, typer.Option(callback=in_range(1, MOST_RUNNING))] = 256,
    kv_tokens: Annotated[
        int, typer.Option(help="size of the KV pool; 0: no pressure", callback=in_range(0))
    ] = 0,
    repeats: Annotated[
        int,
        typer.Option(
            help="after a first run that compiles; 0: that one counts, without graph captures",
            callback=in_range(0),
        ),
    ] = 2,
    deterministic: bool = False,
    precision: PrecisionOption = "base",
    json_file: JsonOption = None,
) -> None:
    """Time of a whole rollout: a recipe's, as a run has it, or plainly with lengths that are asked for."""
    if recipe:
        refuse_beside_recipe(context, {"recipe", "overrides", "requests", "repeats", "json_file"})
        _recipe_rollout(recipe, overrides, requests, repeats, json_file)
        return
    from paceline.bench.lengths import Lengths
    from paceline.bench.rollout import bench_rollout
    from paceline.bench.setup import bench_policy, describe

    rollout_precision = parse_precision(precision)
    device = bench_device(rollout_precision)
    policy = bench_policy(model, device)
    sizes = Lengths.parse(lengths, requests)
    point = bench_rollout(
        policy, sizes, prompt, max_running, kv_tokens, repeats, deterministic, rollout_precision
    )
    say_lines(tables.rollout_lines(point))
    how = {"model": model, "deterministic": deterministic, "precision": str(rollout_precision)}
    write_figures(json_file, {**how, **describe(device), "point": point.record()})


@app.command()
def acceptance(
    recipe: RecipeArgument = "default",
    overrides: Annotated[
        Optional[list[str]],
        typer.Argument(help="section.key=value, such as policy.path=FOLDER rollout.max_tokens=256"),
    ] = None,
    draft: Annotated[
        str, typer.Option(help="the draft model's folder; default: the policy with noise on its weights")
    ] = "",
    disturbance: Annotated[
        float,
        typer.Option(
            help="without --draft: that noise, in standard deviations of each matrix", callback=in_range(0)
        ),
    ] = 0.2,
    tokens: Annotated[int, typer.Option(help="proposed per step", callback=in_range(1, 15))] = 3,
    requests: Annotated[int, typer.Option(help="responses that are sampled", callback=in_range(1))] = 32,
    json_file: JsonOption = None,
) -> None:
    """Shared noise against rejection with the same draft model: expected per token, and realised."""
    recipe, overrides = split_recipe(recipe, overrides)
    from paceline.bench.acceptance import bench_acceptance
    from paceline.bench.recipe import acceptance_config
    from paceline.bench.setup import bench_policy, describe, recipe_policy, recipe_requests
    from paceline.certify.native import disturbed

    config = acceptance_config(recipe, overrides)
    policy, prompts = recipe_policy(config)
    draft_model = bench_policy(draft, policy.device) if draft else disturbed(policy, disturbance)
    point = bench_acceptance(policy, draft_model, recipe_requests(config, prompts, requests), tokens)
    say_lines(tables.acceptance_lines(point))
    drafter = draft or f"the policy disturbed by {disturbance}"
    how = {"recipe": recipe, "overrides": overrides, "draft": drafter, "tokens": tokens}
    write_figures(json_file, {**how, **describe(policy.device), "point": point.record()})


@app.command()
def speculation(
    recipe: RecipeArgument = "default",
    overrides: Annotated[
        Optional[list[str]],
        typer.Argument(help="section.key=value, such as policy.path=FOLDER"),
    ] = None,
    drafter: Annotated[
        str, typer.Option(help="history, eagle or draft_model; its folder is rollout.speculation's")
    ] = "eagle",
    batches: BatchesOption = "1,4,16,64",
    tokens: Annotated[
        str, typer.Option(help="proposed tokens per step, comma separated; 0 (plain) is always measured")
    ] = "1,2,3,5,7",
    verify: Annotated[
        str, typer.Option(help="shared-noise, rejection, or both with a comma")
    ] = "shared-noise",
    rounds: Annotated[int, typer.Option(help="requests per row of the batch", callback=in_range(1))] = 3,
    repeats: RepeatsOption = 2,
    json_file: JsonOption = None,
) -> None:
    """Tokens per second with and without speculation, by batch size, on a policy's own responses."""
    recipe, overrides = split_recipe(recipe, overrides)
    from paceline.bench.recipe import speculation_config
    from paceline.bench.setup import describe, recipe_policy
    from paceline.bench.speculation import bench_recipe

    config = speculation_config(recipe, overrides, drafter)
    sizes, counts = parse_batches(batches), parse_numbers("--tokens", tokens, 0, MOST_PROPOSALS)
    rules = parse_choices("--verify", verify, ("shared-noise", "rejection"))
    policy, prompts = recipe_policy(config)
    typer.echo(tables.SPECULATION_HEADER)
    points = []
    for point in bench_recipe(config, policy, prompts, drafter, sizes, counts, rules, repeats, rounds):
        points.append(point)
        typer.echo(tables.speculation_line(point))
    how = {"recipe": recipe, "overrides": overrides}
    write_figures(json_file, {**how, **describe(policy.device), "points": [p.record() for p in points]})


@app.command()
def pacing(
    context: typer.Context,
    recipe: OwnRecipeArgument = "",
    overrides: OverridesArgument = None,
    model: ModelOption = "builtin",
    requests: RequestsOption = 256,
    prompt: PromptOption = 128,
    lengths: LengthsOption = LONG_TAIL,
    acceptance: Annotated[
        str, typer.Option(help="of the drafter, by depth, comma separated; the last one is repeated")
    ] = "0.8,0.78,0.76,0.74,0.7",
    draft_megabytes: Annotated[
        int,
        typer.Option(
            help="weights that the drafter reads per proposed token; an EAGLE head for 8B has about 650",
            callback=in_range(0),
        ),
    ] = 0,
    tokens: Annotated[
        str, typer.Option(help="proposed tokens per step to measure as fixed strategies, comma separated")
    ] = "1,3,7",
    max_tokens: Annotated[
        int, typer.Option(help="the most that the pacer may choose", callback=in_range(1, MOST_PROPOSALS))
    ] = MOST_PROPOSALS,
    rollouts: Annotated[
        int, typer.Option(help="with the pacer; the first starts from nothing", callback=in_range(1))
    ] = 2,
    graph_memory_gb: Annotated[
        float, typer.Option(help="budget for captured steps", callback=in_range(0, MOST_GB))
    ] = 2.0,
    page: Annotated[Optional[Path], typer.Option(help="write the last paced rollout as an HTML page")] = None,
    json_file: JsonOption = None,
) -> None:
    """Times a rollout with plain decoding, fixed strategies and the pacer.

    With a recipe these are its drafters, precision and lengths. Without one the drafter is synthetic: it has
    seen the answers and spoils them to the acceptance asked for.
    """
    if recipe:
        kept = {"recipe", "overrides", "requests", "tokens", "rollouts", "page", "json_file"}
        refuse_beside_recipe(context, kept)
        _recipe_pacing(recipe, overrides, requests, tokens, rollouts, page, json_file)
        return
    from paceline.bench.lengths import Lengths
    from paceline.bench.pacing import SyntheticPacing, bench_synthetic
    from paceline.bench.setup import bench_policy, describe
    from paceline.device import best_device
    from paceline.report.pace_page import render

    rates = parse_shares("--acceptance", acceptance)
    fixed = parse_numbers("--tokens", tokens, 1, MOST_PROPOSALS)
    device = best_device()
    settings = SyntheticPacing(
        lengths=Lengths.parse(lengths, requests).values,
        prompt_tokens=prompt,
        acceptance=tuple(rates),
        draft_bytes=draft_megabytes * 1_000_000,
        fixed_tokens=tuple(fixed),
        max_tokens=max_tokens,
        rollouts=rollouts,
        graph_memory=int(graph_memory_gb * 1e9),
    )
    typer.echo(
        f"synthetic drafter: right with probability {acceptance} by depth, "
        f"{draft_megabytes} MB read per token; deterministic mode"
    )
    typer.echo(tables.PACING_HEADER)
    result = bench_synthetic(
        bench_policy(model, device), settings, lambda point: typer.echo(tables.pacing_line(point))
    )
    typer.echo(tables.pacing_summary(result))
    if page is not None:
        page.write_text(render(f"bench pacing, {model}", rollouts, result.trace))
    how = {"model": model, "drafters": "synthetic", "acceptance": rates, "draft_megabytes": draft_megabytes}
    write_figures(json_file, {**how, **describe(device), "points": [p.record() for p in result.points]})


def _recipe_rollout(
    recipe: str, overrides: list[str] | None, requests: int, repeats: int, json_file: Path | None
) -> None:
    recipe, overrides = split_recipe(recipe, overrides)
    from paceline.bench.recipe import rollout_config
    from paceline.bench.recipe_rollout import bench_recipe_rollout
    from paceline.bench.setup import describe, recipe_policy

    config = rollout_config(recipe, overrides, "rollout")
    policy, prompts = recipe_policy(config)
    point = bench_recipe_rollout(config, policy, prompts, requests, repeats)
    say_lines(tables.rollout_lines(point))
    how = {"recipe": recipe, "overrides": overrides}
    write_figures(json_file, {**how, **describe(policy.device), "point": point.record()})


def _recipe_pacing(
    recipe: str,
    overrides: list[str] | None,
    requests: int,
    tokens: str,
    rollouts: int,
    page: Path | None,
    json_file: Path | None,
) -> None:
    recipe, overrides = split_recipe(recipe, overrides)
    from paceline.bench.recipe import rollout_config
    from paceline.bench.recipe_rollout import bench_recipe_pacing
    from paceline.bench.setup import describe, recipe_policy
    from paceline.report.pace_page import render

    config = rollout_config(recipe, overrides, "pacing")
    fixed = parse_numbers("--tokens", tokens, 1, MOST_PROPOSALS)
    policy, prompts = recipe_policy(config)
    typer.echo(tables.PACING_HEADER)
    result = bench_recipe_pacing(
        config,
        policy,
        prompts,
        requests,
        fixed,
        rollouts,
        lambda point: typer.echo(tables.pacing_line(point)),
    )
    typer.echo(tables.pacing_summary(result))
    if page is not None:
        page.write_text(render(f"bench pacing, {recipe}", rollouts, result.trace))
    how = {"recipe": recipe, "overrides": overrides, "drafters": "the recipe's"}
    write_figures(
        json_file, {**how, **describe(policy.device), "points": [p.record() for p in result.points]}
    )


@app.command()
def kernels(
    model: Annotated[
        str, typer.Option(help="a folder or a named shape such as qwen3-8b: whose layers are measured")
    ] = "builtin",
    only: Annotated[
        str,
        typer.Option(
            help="of linear, fp8-linear, quantise, attention, fp8-attention, prefill, sampler, "
            "experts, fp8-experts, history, comma separated; default: all that model and "
            "device have"
        ),
    ] = "",
    repeats: Annotated[int, typer.Option(callback=in_range(1, 50))] = 5,
    json_file: JsonOption = None,
) -> None:
    """Times kernels beside torch's equivalents and beside this device's limits.

    Each is compared with torch's result first; exit code 1 if one is wrong.
    """
    from paceline.bench.kernels.run import bench_kernels, choose_kernels, measure_limits
    from paceline.bench.setup import bench_shape, describe

    device = bench_device()
    shape = bench_shape(model)
    names = choose_kernels([name for name in only.split(",") if name], shape, device)
    limits = measure_limits(device, shape)
    typer.echo(tables.limits_line(limits))
    typer.echo(tables.KERNELS_HEADER)
    points = []
    for point in bench_kernels(shape, device, names, limits, repeats):
        points.append(point)
        typer.echo(tables.kernel_line(point))
    how = {"model": model, **describe(device), "limits": limits.record()}
    write_figures(json_file, {**how, "points": [p.record() for p in points]})
    if not all(point.correct for point in points):
        raise typer.Exit(1)
