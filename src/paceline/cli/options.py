"""What commands do with their arguments before anything heavy is imported."""

from typing import Annotated

import typer

from paceline.config import refuse_mistyped_keys
from paceline.types import Precision

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="print results and warnings alone")]


def refuse_given(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    """Raises where one of these options stands on the command line: it would be ignored.

    One that is given with its default counts as well.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"--{name.replace('_', '-')} {context.params[name]}: {why}")


def split_recipe(recipe: str, overrides: list[str] | None) -> tuple[str, list[str]]:
    """Returns the recipe's name and the overrides: a first argument with `=` is one of these.

    A mistyped key is found here.
    """
    if "=" in recipe:
        recipe, overrides = "default", [recipe, *(overrides or [])]
    refuse_mistyped_keys(overrides or [])
    return recipe, list(overrides or [])


def parse_precision(text: str) -> Precision:
    """Returns the rollout precision that `--precision` names; raises with the choices where there is none."""
    try:
        return Precision(text)
    except ValueError:
        choices = ", ".join(Precision)
        raise ValueError(f"--precision {text!r}: must be one of {choices}") from None
