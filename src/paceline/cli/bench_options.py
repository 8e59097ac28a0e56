"""What the `paceline bench` commands share: options, the device they measure, how figures come out."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from paceline.config import ConfigError
from paceline.types import Precision

if TYPE_CHECKING:
    import torch

ModelOption = Annotated[
    str,
    typer.Option(
        help="a folder, FOLDER@8b to widen it, or a named shape with random weights such as qwen3-8b"
    ),
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
PromptOption = Annotated[int, typer.Option(help="prompt tokens")]
LengthsOption = Annotated[str, typer.Option(help="fixed:N or lognormal:MEAN,SIGMA,MIN,MAX")]
BatchesOption = Annotated[str, typer.Option(help="batch sizes, comma separated")]
PrecisionOption = Annotated[str, typer.Option(help="base, fp8, kv or fp8+kv")]
JsonOption = Annotated[Optional[Path], typer.Option("--json", help="also write the figures here")]


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


def parse_numbers(text: str) -> list[int]:
    """Returns the numbers of a list with commas."""
    return [int(number) for number in text.split(",")]


def say_lines(lines: Iterable[str]) -> None:
    """Prints a table."""
    for line in lines:
        typer.echo(line)


def write_figures(path: Path | None, figures: dict) -> None:
    """Writes the figures as JSON where `--json` named a file."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")
