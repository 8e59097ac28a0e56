"""What the `paceline bench` commands share: options, the device they measure, how figures come out."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from paceline.cli.options import in_range
from paceline.cli.saving import OutputFile
from paceline.config import ConfigError
from paceline.types import Precision

if TYPE_CHECKING:
    import torch

MOST_RUNNING = 65536  # as rollout.max_running
MOST_PROPOSALS = 15  # as rollout.speculation.tokens

ModelOption = Annotated[
    str, typer.Option(help="a folder, or a named shape with random weights such as qwen3-8b")
]
RecipeArgument = Annotated[
    str, typer.Argument(help="whose policy, prompts and sampling settings are measured")
]
OwnRecipeArgument = Annotated[
    str,
    typer.Argument(
        help="whose policy, prompts, drafters, precision and lengths are measured; default: the options'"
    ),
]
OverridesArgument = Annotated[
    Optional[list[str]], typer.Argument(help="section.key=value, such as rollout.precision=fp8")
]
PromptOption = Annotated[int, typer.Option(help="prompt tokens", callback=in_range(1))]
RequestsOption = Annotated[int, typer.Option(help="requests of a rollout", callback=in_range(1))]
RepeatsOption = Annotated[
    int, typer.Option(help="measurements, after a first run that compiles", callback=in_range(1))
]
LengthsOption = Annotated[str, typer.Option(help="fixed:N or lognormal:MEAN,SIGMA,MIN,MAX")]
BatchesOption = Annotated[str, typer.Option(help="batch sizes, comma separated")]
PrecisionOption = Annotated[str, typer.Option(help="base, fp8, kv or fp8+kv")]


def _writable(path: Path | None) -> Path | None:
    if path is not None:  # before hours of measuring, not after
        OutputFile("--json", path).refuse_unwritable()
    return path


JsonOption = Annotated[
    Optional[Path], typer.Option("--json", callback=_writable, help="also write the figures here")
]


def bench_device(precision: Precision | None = None) -> "torch.device":
    """Returns the best device at hand; raises where it cannot compute in a precision that was asked for."""
    from paceline.device import best_device, refuse_old_gpu

    device = best_device()
    if device.type == "cuda" and precision is not None:
        refuse_old_gpu(precision, "--precision")
    return device


def refuse_beside_recipe(context: typer.Context, kept: set[str]) -> None:
    """Raises where an option was given that a recipe decides; `kept` are those that it does not."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in kept and source is not None and source.name == "COMMANDLINE":
            raise ConfigError(
                f"--{name.replace('_', '-')} = {context.params[name]!r}: with a recipe its own setting is "
                "measured; leave the option out and override the recipe's key instead"
            )


def parse_batches(text: str) -> list[int]:
    """Returns the batch sizes that `--batches` lists."""
    return parse_numbers("--batches", text, 1, MOST_RUNNING)


def parse_numbers(option: str, text: str, least: int, most: int) -> list[int]:
    """Returns the whole numbers that an option lists with commas; raises where one is not allowed."""
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(least <= number <= most for number in numbers):
        raise ValueError(
            f"{option} {text!r}: must be whole numbers from {least} to {most}, with commas between, "
            f"such as {least},{least + 2}"
        )
    return numbers


def parse_shares(option: str, text: str) -> list[float]:
    """Returns the shares that an option lists with commas; raises where one is not from 0 to 1."""
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise ValueError(
            f"{option} {text!r}: must be numbers from 0 to 1, with commas between, such as 0.8,0.7"
        )
    return shares


def parse_choices(option: str, text: str, choices: tuple[str, ...]) -> list[str]:
    """Returns the names that an option lists with commas; raises where one is no choice."""
    names = text.split(",")
    if not set(names) <= set(choices):
        raise ValueError(f"{option} {text!r}: must be of {', '.join(choices)}, with commas between")
    return names


def say_lines(lines: Iterable[str]) -> None:
    """Prints a table."""
    for line in lines:
        typer.echo(line)


def write_figures(path: Path | None, figures: dict) -> None:
    """Writes the figures as JSON where `--json` named a file."""
    if path is None:
        return
    with OutputFile("--json", path).writing():
        path.write_text(json.dumps(figures, indent=2) + "\n")
