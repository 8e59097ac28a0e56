"""The command line. Heavy imports stay inside the commands, so that `--help` answers at once."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from paceline import __version__
from paceline.cli.bench import app as bench_app
from paceline.cli.certify import certify
from paceline.cli.drafter import app as drafter_app
from paceline.cli.launch import launch
from paceline.cli.models import app as models_app
from paceline.cli.options import QuietOption, SeedOption, refuse_given, split_recipe
from paceline.cli.progress import announce, step_progress
from paceline.cli.report import report
from paceline.cli.saving import prepare_samples_folder
from paceline.cli.simulate import simulate
from paceline.cli.streams import lasting_output
from paceline.config import (
    Config,
    ConfigError,
    dump_config,
    load_config,
    refuse_mistyped_keys,
    rollout_notes,
    shipped_recipes,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="RL post-training at speculative speed.",
)

app.add_typer(bench_app, name="bench")
app.add_typer(drafter_app, name="drafter")
app.add_typer(models_app, name="models")
app.command()(certify)
app.command()(launch)
app.command()(report)
app.command()(simulate)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def paceline(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """RL post-training at speculative speed."""


RecipeArgument = Annotated[
    Optional[str], typer.Argument(help="a YAML file or a shipped recipe's name; see `paceline recipes`")
]
OverridesArgument = Annotated[Optional[list[str]], typer.Argument(help="section.key=value, any number")]


@app.command()
def train(
    recipe: RecipeArgument = None,
    overrides: OverridesArgument = None,
    resume: Annotated[Optional[Path], typer.Option(help="continue the run in this directory")] = None,
    replay: Annotated[
        Optional[Path], typer.Option(help="learn from rollouts saved by `paceline rollout --save`")
    ] = None,
    torch_profiler: Annotated[
        int, typer.Option(help="watch this step with torch's profiler; profile/ in the run directory", min=0)
    ] = 0,
    quiet: QuietOption = False,
    schedule: Annotated[
        Optional[Path],
        typer.Option(help="repeat which groups each step learned from: an earlier run's schedule.jsonl"),
    ] = None,
) -> None:
    """Trains a policy; without a recipe, the built-in one on the CPU."""
    named, overrides = split_recipe(recipe or "default", overrides)
    from paceline.cli.train import run_train_command

    if resume is not None and recipe == named:
        raise ConfigError(
            f"--resume takes its recipe from {resume}; leave out {recipe!r} and pass changes as "
            "section.key=value"
        )
    if replay is not None and schedule is not None:
        raise ConfigError(
            f"--schedule {schedule}: --replay {replay} takes its groups from files; use one of the two"
        )
    run_train_command(named, overrides, resume, replay, schedule, quiet, torch_profiler)


@app.command()
def warmup(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(help="folder for the new checkpoint")],
    overrides: Annotated[
        Optional[list[str]], typer.Argument(help="with --recipe: section.key=value, any number")
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="train on demonstrations of this recipe's task, asked as the recipe asks")
    ] = "",
    data: Annotated[Optional[Path], typer.Option(help="train on a JSONL of `prompt` and `response`")] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="the Hugging Face folder to start from; `fresh`: a small untrained one that reads the "
            "recipe's task, with a token for each number and symbol"
        ),
    ] = "builtin",
    seed: SeedOption = 0,
    examples: Annotated[int, typer.Option(help="with --recipe: how many demonstrations", min=1)] = 20000,
    epochs: Annotated[int, typer.Option(help="passes over the examples", min=1)] = 3,
    batch_size: Annotated[int, typer.Option(help="examples per optimiser step", min=1)] = 32,
    lr: Annotated[float, typer.Option(help="at its highest; it falls to 0 along a cosine")] = 1e-4,
    quiet: QuietOption = False,
) -> None:
    """Makes a starting checkpoint by supervised training, on a task's demonstrations or a file's examples."""
    if recipe:
        load_config(recipe, overrides or [])
    from paceline.cli.warmup import loss_progress, refuse_existing, warm_up_from_file, warm_up_from_task
    from paceline.learning.warmup import WarmupSettings

    refuse_existing(out)
    if recipe and data is not None:
        raise ValueError(
            f"--recipe {recipe} and --data {data}: examples come from one of them; leave one out"
        )
    if overrides and not recipe:
        raise ValueError(
            f"{overrides[0]!r} changes a recipe; name one with --recipe, such as --recipe countdown"
        )
    if data is not None:
        refuse_given(context, ("examples",), "--data takes every line of the file; leave it out")
        if data.is_dir() or not data.exists():
            wrong = "is a folder" if data.is_dir() else "there is no such file"
            raise ValueError(f"--data {data}: {wrong}; give a JSONL of `prompt` and `response`")
    elif not recipe:
        raise ValueError(
            "there are no examples to learn from: give --data FILE, a JSONL of `prompt` and `response`, or "
            "--recipe NAME for a task's demonstrations, such as --recipe countdown"
        )
    settings = WarmupSettings(epochs, batch_size, lr, seed)
    source = f"recipe {recipe}" if recipe else str(data)
    announce(f"supervised warm-up of {policy} on examples of {source}; written to {out}", quiet)
    with step_progress("warm-up", quiet) as show:
        progress = loss_progress(show)
        if data is not None:
            warm_up_from_file(out, data, policy, settings, progress)
        else:
            warm_up_from_task(out, recipe, overrides or [], policy, examples, settings, progress)
    typer.echo(f"written to {out}")


@app.command("eval")
def evaluate_command(
    policy: Annotated[
        str,
        typer.Argument(help="a run directory, one of its checkpoints, a Hugging Face folder, or `builtin`"),
    ],
    overrides: OverridesArgument = None,
    recipe: Annotated[
        str,
        typer.Option(
            help="where task and evaluation settings come from; default: the recipe of the policy's own run, "
            "or the one called `default`"
        ),
    ] = "",
    quiet: QuietOption = False,
) -> None:
    """Measures a policy on a recipe's held-out problems."""
    if recipe:
        load_config(recipe, overrides or [])
    refuse_mistyped_keys(overrides or [])
    from paceline.cli.evaluate import evaluate_policy

    evaluate_policy(policy, list(overrides or []), recipe, quiet)


@app.command()
def rollout(
    recipe: RecipeArgument = None,
    overrides: OverridesArgument = None,
    steps: Annotated[int, typer.Option(help="how many steps' worth of samples", min=1)] = 1,
    save: Annotated[
        Optional[Path], typer.Option(help="new folder to write the samples to, for `train --replay`")
    ] = None,
) -> None:
    """Generates and scores samples without learning."""
    named, overrides = split_recipe(recipe or "default", overrides)
    config = load_config(named, overrides)
    if save is not None:
        prepare_samples_folder(save)
    from paceline.report.metrics import rollout_metrics
    from paceline.rollout.samples import write_groups
    from paceline.rollout.sources import LiveRollouts
    from paceline.session import open_session
    from paceline.tasks.order import ProblemOrder

    session = open_session(_noted(config))
    settings = session.config.rollout
    order = ProblemOrder(session.task.train, session.config.run.seed)
    source = LiveRollouts(
        session.sampler,
        order,
        settings.prompts_per_step,
        settings.samples_per_prompt,
        session.train_sampling(),
    )
    for step in range(1, steps + 1):
        groups = source.collect(step)
        metrics = rollout_metrics(groups, source.take_stats())
        typer.echo(
            f"step {step}: reward {metrics['reward/mean']:.3f}, accuracy {metrics['rollout/accuracy']:.3f}, "
            f"mean length {metrics['rollout/length_mean']:.1f}"
        )
        if save is not None:
            write_groups(save / f"step_{step:06d}.jsonl", groups, session.tokenizer)
    session.close()
    if save is not None:
        typer.echo(f"written to {save}")


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="a run directory, or one of its checkpoints")],
    out: Annotated[Path, typer.Argument(help="folder to write")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float64; default: as saved")] = "",
    force: Annotated[
        bool, typer.Option("--force", help="replace the model in a folder that is used")
    ] = False,
) -> None:
    """Writes a checkpoint's policy as a Hugging Face folder that transformers and vLLM open."""
    from paceline.cli.export import export_policy

    source = export_policy(checkpoint, out, dtype, force)
    typer.echo(f"{source} written to {out}")


@app.command()
def plan(
    recipe: RecipeArgument = None,
    overrides: OverridesArgument = None,
    gpu: Annotated[str, typer.Option(help="H200, H100, A100, ...; default: this machine's GPU")] = "",
    memory_gb: Annotated[Optional[float], typer.Option(help="of a GPU that has no name here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Says what a recipe takes of a GPU's memory, part by part; refuses what cannot fit.

    policy.path may name a shape such as qwen3-8b.
    """
    named, overrides = split_recipe(recipe or "default", overrides)
    config = load_config(named, overrides)
    from paceline.cli.plan import show_plan

    show_plan(config, gpu, memory_gb, as_json)


@app.command()
def doctor() -> None:
    """Says what this machine can run, and why not the rest."""
    from paceline.cli.doctor import examine

    for finding in examine():
        typer.echo(f"{'yes' if finding.works else 'no ':<4}{finding.what:<28}{finding.detail}")


@app.command()
def recipes(
    name: Annotated[
        Optional[str], typer.Argument(help="print this one, with every default filled in")
    ] = None,
    overrides: Annotated[
        Optional[list[str]], typer.Argument(help="section.key=value: with what these bring, too")
    ] = None,
) -> None:
    """Lists the shipped recipes."""
    if name is not None:
        typer.echo(dump_config(load_config(name, list(overrides or []))), nl=False)
        return
    for stem, path in shipped_recipes().items():
        lines = path.read_text().splitlines()
        typer.echo(f"{stem:<20}{lines[0].lstrip('# ') if lines and lines[0].startswith('#') else ''}")


def _noted(config: Config) -> Config:
    for note in rollout_notes(config.rollout):
        typer.secho(note, fg="yellow", err=True)
    return config


def main() -> None:
    """Runs the command line; what the user can put right ends it with a message and exit code 2."""
    with lasting_output():
        try:
            app()
        except (ConfigError, OSError, ValueError) as error:
            typer.secho(f"error: {error}", fg="red", err=True)
            raise SystemExit(2) from None
