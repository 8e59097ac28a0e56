"""The `paceline bench` commands: options in, one call of `bench/`, figures out."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from paceline.cli import bench_tables as tables
from paceline.cli.options import QuietOption, parse_precision, split_recipe
from paceline.cli.progress import announce, working
from paceline.types import Precision

if TYPE_CHECKING:
    import torch

app = typer.Typer(no_args_is_help=True, help="Measure this machine: medians of repeats, with their spread.")

ModelOption = Annotated[
    str,
    typer.Option(
        help="a folder, FOLDER@8b to widen it, or a named shape with random weights such as qwen3-8b"
    ),
]
RecipeArgument = Annotated[
    str, typer.Argument(help="whose policy, prompts and sampling settings are measured")
]
PromptOption = Annotated[int, typer.Option(help="prompt tokens")]
LengthsOption = Annotated[str, typer.Option(help="fixed:N or lognormal:MEAN,SIGMA,MIN,MAX")]
BatchesOption = Annotated[str, typer.Option(help="batch sizes, comma separated")]
PrecisionOption = Annotated[str, typer.Option(help="base, fp8 or fp8+kv")]
JsonOption = Annotated[Optional[Path], typer.Option("--json", help="also write the figures here")]
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
    new: Annotated[int, typer.Option(help="new tokens")] = 256,
    proposals: Annotated[
        str, typer.Option(help="proposed tokens that each step verifies, comma separated; 0: plain decoding")
    ] = "0",
    repeats: int = 3,
    deterministic: bool = False,
    precision: PrecisionOption = "base",
    json_file: JsonOption = None,
) -> None:
    """Time of one decode or verify step by batch size."""
    from paceline.bench.decode import bench_decode
    from paceline.bench.setup import bench_policy, describe

    rollout_precision = parse_precision(precision)
    device = _device(rollout_precision)
    policy = bench_policy(model, device)
    points = bench_decode(
        policy, _numbers(batches), prompt, new, repeats, deterministic, _numbers(proposals), rollout_precision
    )
    _say(tables.decode_lines(points))
    how = {"model": model, "deterministic": deterministic, "precision": str(rollout_precision)}
    _write(json_file, {**how, **describe(device), "points": [p.record() for p in points]})


@app.command()
def rollout(
    model: ModelOption = "builtin",
    requests: int = 256,
    prompt: PromptOption = 128,
    lengths: LengthsOption = LONG_TAIL,
    max_running: int = 256,
    kv_tokens: Annotated[int, typer.Option(help="size of the KV pool; 0: no pressure")] = 0,
    repeats: Annotated[
        int,
        typer.Option(
            help="after a first run that compiles; 0: that one counts, without graph captures", min=0
        ),
    ] = 2,
    deterministic: bool = False,
    precision: PrecisionOption = "base",
    json_file: JsonOption = None,
) -> None:
    """Time of a whole long-tailed rollout."""
    from paceline.bench.lengths import Lengths
    from paceline.bench.rollout import bench_rollout
    from paceline.bench.setup import bench_policy, describe

    rollout_precision = parse_precision(precision)
    device = _device(rollout_precision)
    policy = bench_policy(model, device)
    sizes = Lengths.parse(lengths, requests)
    point = bench_rollout(
        policy, sizes, prompt, max_running, kv_tokens, repeats, deterministic, rollout_precision
    )
    _say(tables.rollout_lines(point))
    how = {"model": model, "deterministic": deterministic, "precision": str(rollout_precision)}
    _write(json_file, {**how, **describe(device), "point": point.record()})


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
        float, typer.Option(help="without --draft: that noise, in standard deviations of each matrix")
    ] = 0.2,
    tokens: Annotated[int, typer.Option(help="proposed per step", min=1, max=15)] = 3,
    requests: Annotated[int, typer.Option(help="responses that are sampled", min=1)] = 32,
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
    _say(tables.acceptance_lines(point))
    drafter = draft or f"the policy disturbed by {disturbance}"
    how = {"recipe": recipe, "overrides": overrides, "draft": drafter, "tokens": tokens}
    _write(json_file, {**how, **describe(policy.device), "point": point.record()})


@app.command()
def speculation(
    recipe: RecipeArgument = "default",
    overrides: Annotated[
        Optional[list[str]],
        typer.Argument(help="section.key=value, such as policy.path=FOLDER policy.widen=8b"),
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
    rounds: Annotated[int, typer.Option(help="requests per row of the batch")] = 3,
    repeats: int = 2,
    json_file: JsonOption = None,
) -> None:
    """Tokens per second with and without speculation, by batch size, on a policy's own responses."""
    recipe, overrides = split_recipe(recipe, overrides)
    from paceline.bench.recipe import speculation_config
    from paceline.bench.setup import describe, recipe_policy
    from paceline.bench.speculation import bench_recipe

    config = speculation_config(recipe, overrides, drafter)
    sizes, counts = _numbers(batches), _numbers(tokens)
    policy, prompts = recipe_policy(config)
    typer.echo(tables.SPECULATION_HEADER)
    points = []
    for point in bench_recipe(
        config, policy, prompts, drafter, sizes, counts, verify.split(","), repeats, rounds
    ):
        points.append(point)
        typer.echo(tables.speculation_line(point))
    how = {"recipe": recipe, "overrides": overrides}
    _write(json_file, {**how, **describe(policy.device), "points": [p.record() for p in points]})


@app.command()
def pacing(
    model: ModelOption = "builtin",
    requests: int = 256,
    prompt: PromptOption = 128,
    lengths: LengthsOption = LONG_TAIL,
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
    """Times a long-tailed rollout with plain decoding, fixed strategies and the pacer.

    The drafter is synthetic: it has seen the answers and spoils them to the acceptance asked for.
    """
    from paceline.bench.lengths import Lengths
    from paceline.bench.pacing import SyntheticPacing, bench_synthetic
    from paceline.bench.setup import bench_policy, describe
    from paceline.device import best_device
    from paceline.report.pace_page import render

    device = best_device()
    rates = [float(rate) for rate in acceptance.split(",")]
    settings = SyntheticPacing(
        lengths=Lengths.parse(lengths, requests).values,
        prompt_tokens=prompt,
        acceptance=tuple(rates),
        draft_bytes=draft_megabytes * 1_000_000,
        fixed_tokens=tuple(_numbers(tokens)),
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
    how = {"model": model, "acceptance": rates, "draft_megabytes": draft_megabytes}
    _write(json_file, {**how, **describe(device), "points": [p.record() for p in result.points]})


@app.command()
def step(
    recipe: RecipeArgument = "default",
    overrides: Annotated[
        Optional[list[str]], typer.Argument(help="section.key=value, for all settings")
    ] = None,
    settings: Annotated[
        str,
        typer.Option(
            help="plain, history, eagle, paced, fp8, fp8+kv, fp8+kv+paced, or ones of your own as "
            "NAME:PART;PART, each part a setting's name or section.key=value; comma separated"
        ),
    ] = "plain,history,eagle,paced",
    steps: Annotated[int, typer.Option(help="RL steps of a cell", min=1)] = 4,
    first_steps: Annotated[
        int, typer.Option(help="of these, the ones that compile and capture: in no median", min=0)
    ] = 1,
    repeats: Annotated[int, typer.Option(help="cells of each setting, with the same seeds", min=1)] = 2,
    out: Annotated[Path, typer.Option(help="folder of the cells; complete ones are not run again")] = Path(
        "bench-step"
    ),
    only: Annotated[str, typer.Option(help="run cells of these settings only, comma separated")] = "",
    budget: Annotated[
        Optional[float], typer.Option(help="seconds: no cell starts that would end later")
    ] = None,
    json_file: JsonOption = None,
    plot: Annotated[Optional[Path], typer.Option(help="also write the stages as an SVG")] = None,
) -> None:
    """Times RL steps under several settings on the same seeds and problems, stage by stage; resumable.

    Exit code 1 if tokens differ where they must not.
    """
    recipe, overrides = split_recipe(recipe, overrides)
    from paceline.bench.step import measure_cells, plan_cells
    from paceline.bench.step_figures import make_figures
    from paceline.bench.step_plot import plot_steps
    from paceline.bench.step_settings import parse_settings

    if steps <= first_steps:
        raise ValueError(f"--steps {steps}: must be more than --first-steps {first_steps}")
    compared = parse_settings(settings)
    names = [setting.name for setting in compared]
    wanted = [name for name in only.split(",") if name] or names
    for name in wanted:
        if name not in names:
            raise ValueError(f"--only {only}: {name!r} is not in --settings ({', '.join(names)})")
    cells = plan_cells(recipe, overrides, compared, steps, repeats, out)
    measured = measure_cells(cells, wanted, budget, typer.echo)
    figures = make_figures(cells, measured, first_steps)
    _say(tables.step_lines(figures))
    how = {"recipe": recipe, "overrides": overrides, "steps": steps, "repeats": repeats}
    _write(json_file, {**how, **figures.record()})
    if plot is not None and figures.settings:
        plot.write_text(plot_steps(figures, f"RL steps, {recipe}"))
    for problem in figures.problems:
        typer.secho(f"error: tokens must be the same: {problem}", fg="red", err=True)
    if figures.problems:
        raise typer.Exit(1)


@app.command()
def learn(
    model: ModelOption = "builtin",
    overrides: Annotated[
        Optional[list[str]],
        typer.Argument(
            help="section.key=value, such as policy.lora.rank=32 policy.activation_checkpointing=true"
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(help="groups of responses, each to a prompt of its own", min=1)] = 8,
    samples: Annotated[int, typer.Option(help="responses to each prompt", min=1)] = 8,
    prompt: PromptOption = 192,
    lengths: LengthsOption = "lognormal:1196,1.0,16,6000",
    micro_batch_tokens: Annotated[
        int, typer.Option(help="tokens per forward and backward pass", min=64)
    ] = 16384,
    repeats: Annotated[int, typer.Option(help="updates that are timed, after a first one", min=1)] = 3,
    json_file: JsonOption = None,
) -> None:
    """Times the learner's update: tokens per second, share of the peak, memory, and where the time goes.

    Random tokens and rewards; by default 64 long-tailed responses to 8 prompts, 84,039 tokens in all.
    """
    from paceline.bench.learn import LearnWorkload, bench_learn, make_learner
    from paceline.bench.lengths import Lengths
    from paceline.bench.setup import bench_policy, describe
    from paceline.config import load_config

    device = _device()
    given = list(overrides or [])
    config = load_config(None, [f"learning.micro_batch_tokens={micro_batch_tokens}", *given])
    policy = bench_policy(model, device)
    workload = LearnWorkload(prompt, samples, Lengths.parse(lengths, prompts * samples).values)
    point = bench_learn(make_learner(policy, config), workload.groups(policy.config.vocab_size), repeats)
    _say(tables.learn_lines(point))
    how = {"model": model, "overrides": given, "lengths": lengths, "micro_batch_tokens": micro_batch_tokens}
    _write(json_file, {**how, **describe(device), "point": point.record()})


@app.command()
def kernels(
    model: Annotated[
        str, typer.Option(help="a folder or a named shape such as qwen3-8b: whose layers are measured")
    ] = "builtin",
    only: Annotated[
        str,
        typer.Option(
            help="of linear, fp8-linear, quantise, attention, fp8-attention, prefill, sampler, experts, "
            "fp8-experts, history, comma separated; default: all that model and device have"
        ),
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, max=50)] = 5,
    json_file: JsonOption = None,
) -> None:
    """Times kernels beside torch's equivalents and beside this device's limits.

    Each is compared with torch's result first; exit code 1 if one is wrong.
    """
    from paceline.bench.kernels.run import bench_kernels, choose_kernels, measure_limits
    from paceline.bench.setup import bench_shape, describe

    device = _device()
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
    _write(json_file, {**how, "points": [p.record() for p in points]})
    if not all(point.correct for point in points):
        raise typer.Exit(1)


@app.command()
def memory(
    recipe: Annotated[str, typer.Argument(help="whose plan is compared with the GPU at hand")] = "default",
    overrides: Annotated[
        Optional[list[str]],
        typer.Argument(help="section.key=value; policy.path may name a shape such as qwen3-8b"),
    ] = None,
    steps: Annotated[int, typer.Option(help="of rollout and learning", min=1)] = 2,
    json_file: JsonOption = None,
) -> None:
    """Measures the peak memory of a few training steps beside what `paceline plan` says.

    Weights are random, and every prompt and response is as long as the recipe allows.
    """
    recipe, overrides = split_recipe(recipe, overrides)
    from paceline.bench.memory import bench_memory
    from paceline.bench.setup import describe, recipe_shape
    from paceline.config import load_config

    device = _device()
    config = load_config(recipe, overrides)
    point = bench_memory(config, *recipe_shape(config, device), steps)
    _say(tables.memory_lines(point))
    how = {"recipe": recipe, "overrides": overrides}
    _write(json_file, {**how, **describe(device), "point": point.record()})


def _device(precision: Precision | None = None) -> "torch.device":
    """Returns the best device at hand; raises where it cannot compute in a precision that was asked for."""
    from paceline.device import best_device, refuse_old_gpu

    device = best_device()
    if device.type == "cuda" and precision is not None:
        refuse_old_gpu(precision, "--precision")
    return device


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


def _write(path: Path | None, figures: dict) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")
