"""The `paceline bench` commands about learning: whole RL steps, updates, and the memory of both."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from paceline.cli import bench_tables as tables
from paceline.cli.bench_options import (
    JsonOption,
    LengthsOption,
    ModelOption,
    PromptOption,
    RecipeArgument,
    bench_device,
    say_lines,
    write_figures,
)
from paceline.cli.options import in_range, split_recipe


def step(
    recipe: RecipeArgument = "default",
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
    say_lines(tables.step_lines(figures))
    how = {"recipe": recipe, "overrides": overrides, "steps": steps, "repeats": repeats}
    write_figures(json_file, {**how, **figures.record()})
    if plot is not None and figures.settings:
        plot.write_text(plot_steps(figures, f"RL steps, {recipe}"))
    for problem in figures.problems:
        typer.secho(f"error: tokens must be the same: {problem}", fg="red", err=True)
    if figures.problems:
        raise typer.Exit(1)


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
    """
    from paceline.bench.learn import LearnWorkload, bench_learn, make_learner
    from paceline.bench.lengths import Lengths
    from paceline.bench.setup import bench_policy, describe, refuse_beyond_positions
    from paceline.config import load_config

    device = bench_device()
    given = list(overrides or [])
    config = load_config(None, [f"learning.micro_batch_tokens={micro_batch_tokens}", *given])
    policy = bench_policy(model, device)
    workload = LearnWorkload(prompt, samples, Lengths.parse(lengths, prompts * samples).values)
    refuse_beyond_positions(policy.config, prompt, max(workload.response_lengths), "--lengths")
    point = bench_learn(make_learner(policy, config), workload.groups(policy.config.vocab_size), repeats)
    say_lines(tables.learn_lines(point))
    how = {"model": model, "overrides": given, "lengths": lengths, "micro_batch_tokens": micro_batch_tokens}
    write_figures(json_file, {**how, **describe(device), "point": point.record()})


def memory(
    recipe: Annotated[str, typer.Argument(help="whose plan is compared with the GPU at hand")] = "default",
    overrides: Annotated[
        Optional[list[str]],
        typer.Argument(help="section.key=value; policy.path may name a shape such as qwen3-8b"),
    ] = None,
    steps: Annotated[int, typer.Option(help="of rollout and learning", callback=in_range(1))] = 2,
    json_file: JsonOption = None,
) -> None:
    """Measures the peak memory of a few training steps beside what `paceline plan` says.

    Weights are random, and every prompt and response is as long as the recipe allows.
    """
    recipe, overrides = split_recipe(recipe, overrides)
    from paceline.bench.memory import bench_memory
    from paceline.bench.setup import describe, recipe_shape
    from paceline.config import load_config

    device = bench_device()
    config = load_config(recipe, overrides)
    point = bench_memory(config, *recipe_shape(config, device), steps)
    say_lines(tables.memory_lines(point))
    how = {"recipe": recipe, "overrides": overrides}
    write_figures(json_file, {**how, **describe(device), "point": point.record()})
