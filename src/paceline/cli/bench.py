"""The `paceline bench` commands: options in, one call of `bench/`, figures out."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from paceline.cli import bench_tables as tables
from paceline.cli.options import QuietOption, in_range, parse_precision, refuse_given, split_recipe
from paceline.cli.progress import announce, working
from paceline.cli.saving import OutputFile, writable
from paceline.types import Precision

if TYPE_CHECKING:
    import torch

# Options of `bench rollout` that a recipe decides.
OF_A_RECIPE = ("model", "prompt", "lengths", "max_running", "kv_tokens", "deterministic", "precision")

app = typer.Typer(no_args_is_help=True, help="Measure this machine: medians of repeats, with their spread.")


JsonOption = Annotated[
    Optional[Path], typer.Option("--json", callback=writable("--json"), help="also write the figures here")
]
ModelOption = Annotated[
    str, typer.Option(help="a folder, or a named shape with random weights such as qwen3-8b")
]
PromptOption = Annotated[int, typer.Option(help="prompt tokens", callback=in_range(1))]
LengthsOption = Annotated[str, typer.Option(help="fixed:N or lognormal:MEAN,SIGMA,MIN,MAX")]


@app.callback()
def bench(context: typer.Context, quiet: QuietOption = False) -> None:
    """Measure this machine: medians of repeats, with their spread."""
    if "--help" in sys.argv:
        return
    name = context.invoked_subcommand
    announce(f"bench {name}: measures this machine; prints figures, and writes them where --json says", quiet)
    context.with_resource(working(f"bench {name}", quiet))


@app.command()
def step(
    recipe: Annotated[
        str, typer.Argument(help="whose policy, prompts and sampling settings are measured")
    ] = "default",
    overrides: Annotated[
        Optional[list[str]], typer.Argument(help="section.key=value, for all settings")
    ] = None,
    settings: Annotated[
        str,
        typer.Option(
            help="plain, history, eagle, paced, fp8, kv, fp8+kv, fp8+kv+paced, or ones of your own as "
            "NAME:PART;PART, each part a setting's name or section.key=value; comma separated"
        ),
    ] = "plain,history,eagle,paced",
    steps: Annotated[int, typer.Option(help="RL steps of a cell", callback=in_range(1))] = 4,
    first_steps: Annotated[
        int,
        typer.Option(help="of these, the ones that compile and capture: in no median", callback=in_range(0)),
    ] = 1,
    repeats: Annotated[
        int, typer.Option(help="cells of each setting, with the same seeds", callback=in_range(1))
    ] = 2,
    out: Annotated[Path, typer.Option(help="folder of the cells; complete ones are not run again")] = Path(
        "bench-step"
    ),
    budget: Annotated[
        Optional[float], typer.Option(help="seconds: no cell starts that would end later")
    ] = None,
    json_file: JsonOption = None,
    plot: Annotated[
        Optional[Path], typer.Option(callback=writable("--plot"), help="also write the stages as an SVG")
    ] = None,
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
    cells = plan_cells(recipe, overrides, compared, steps, repeats, out)
    measured = measure_cells(cells, budget, typer.echo)
    figures = make_figures(cells, measured, first_steps)
    _say(tables.step_lines(figures))
    how = {"recipe": recipe, "overrides": overrides, "steps": steps, "repeats": repeats}
    _write(json_file, {**how, **figures.record()})
    if plot is not None and figures.settings:
        _write_text("--plot", plot, plot_steps(figures, f"RL steps, {recipe}"))
    for problem in figures.problems:
        typer.secho(f"error: tokens must be the same: {problem}", fg="red", err=True)
    if figures.problems:
        raise typer.Exit(1)


@app.command()
def rollout(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            help="whose policy, prompts, drafters, precision and lengths are measured; default: the options'"
        ),
    ] = "",
    overrides: Annotated[
        Optional[list[str]], typer.Argument(help="section.key=value, such as rollout.precision=fp8")
    ] = None,
    model: ModelOption = "builtin",
    requests: Annotated[int, typer.Option(help="requests of a rollout", callback=in_range(1))] = 256,
    prompt: PromptOption = 128,
    lengths: LengthsOption = "lognormal:512,1.0,16,4096",
    max_running: Annotated[int, typer.Option(callback=in_range(1, 65536))] = 256,
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
    precision: Annotated[str, typer.Option(help="base, fp8, kv or fp8+kv")] = "base",
    json_file: JsonOption = None,
) -> None:
    """Time of a whole rollout: a recipe's, as a run has it, or plainly with lengths that are asked for."""
    if recipe:
        refuse_given(context, OF_A_RECIPE, "a recipe says this itself; override its key instead")
        recipe, given = split_recipe(recipe, overrides)
    from paceline.bench.lengths import Lengths
    from paceline.bench.recipe import rollout_config
    from paceline.bench.recipe_rollout import bench_recipe_rollout
    from paceline.bench.rollout import bench_rollout
    from paceline.bench.setup import bench_policy, describe, recipe_policy

    how: dict[str, object]
    if recipe:
        config = rollout_config(recipe, given)
        policy, prompts = recipe_policy(config)
        point = bench_recipe_rollout(config, policy, prompts, requests, repeats)
        how = {"recipe": recipe, "overrides": given}
    else:
        wanted = parse_precision(precision)
        policy = bench_policy(model, _device(wanted))
        sizes = Lengths.parse(lengths, requests)
        point = bench_rollout(policy, sizes, prompt, max_running, kv_tokens, repeats, deterministic, wanted)
        how = {"model": model, "deterministic": deterministic, "precision": str(wanted)}
    _say(tables.rollout_lines(point))
    _write(json_file, {**how, **describe(policy.device), "point": point.record()})


@app.command()
def learn(
    model: ModelOption = "builtin",
    overrides: Annotated[
        Optional[list[str]],
        typer.Argument(
            help="section.key=value, such as policy.lora.rank=32 policy.activation_checkpointing=true"
        ),
    ] = None,
    prompts: Annotated[
        int, typer.Option(help="groups of responses, each to a prompt of its own", callback=in_range(1))
    ] = 8,
    samples: Annotated[int, typer.Option(help="responses to each prompt", callback=in_range(1))] = 8,
    prompt: PromptOption = 192,
    lengths: LengthsOption = "lognormal:1196,1.0,16,6000",
    micro_batch_tokens: Annotated[
        int, typer.Option(help="tokens per forward and backward pass", callback=in_range(64))
    ] = 16384,
    repeats: Annotated[
        int, typer.Option(help="updates that are timed, after a first one", callback=in_range(1))
    ] = 3,
    json_file: JsonOption = None,
) -> None:
    """Times the learner's update: tokens per second, share of the peak, memory, and where the time goes.

    Random tokens and rewards; by default 64 long-tailed responses to 8 prompts, 84,039 tokens in all.
    With learning.algorithm=sft a step of `paceline sft` on them.
    """
    from paceline.bench.learn import LearnWorkload, bench_learn, make_learner
    from paceline.bench.lengths import Lengths
    from paceline.bench.setup import bench_policy, describe, refuse_beyond_positions
    from paceline.config import load_config

    device = _device()
    given = list(overrides or [])
    config = load_config(None, [f"learning.micro_batch_tokens={micro_batch_tokens}", *given])
    policy = bench_policy(model, device)
    workload = LearnWorkload(prompt, samples, Lengths.parse(lengths, prompts * samples).values)
    refuse_beyond_positions(policy.config, prompt, max(workload.response_lengths), "--lengths")
    point = bench_learn(make_learner(policy, config), workload.groups(policy.config.vocab_size), repeats)
    _say(tables.learn_lines(point))
    how = {"model": model, "overrides": given, "lengths": lengths, "micro_batch_tokens": micro_batch_tokens}
    _write(json_file, {**how, **describe(device), "point": point.record()})


def _device(precision: Precision | None = None) -> "torch.device":
    """Returns the best device; raises where it cannot compute in the requested precision."""
    from paceline.device import best_device, refuse_old_gpu

    device = best_device()
    if device.type == "cuda" and precision is not None:
        refuse_old_gpu(precision, "--precision")
    return device


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


def _write(path: Path | None, figures: dict) -> None:
    if path is not None:
        _write_text("--json", path, json.dumps(figures, indent=2) + "\n")


def _write_text(option: str, path: Path, text: str) -> None:
    with OutputFile(option, path).writing():
        path.write_text(text)
