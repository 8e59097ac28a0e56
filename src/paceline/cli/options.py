"""What commands do with their arguments before anything heavy is imported."""

import math
from collections.abc import Callable
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


def in_range(least: float, most: float = math.inf) -> Callable[[typer.CallbackParam, float], float]:
    """Returns the callback of an option whose number has bounds; it raises with the value where it has not.

    Typer's own `min` and `max` leave the value out.
    """

    def check(option: typer.CallbackParam, value: float) -> float:
        if not least <= value <= most:
            allowed = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            raise ValueError(f"{option.opts[0]} {value}: must be {allowed}")
        return value

    return check


# A seed of random numbers, up to what torch takes.
SeedOption = Annotated[int, typer.Option(callback=in_range(0, 2**63 - 1))]


def split_recipe(recipe: str, overrides: list[str] | None) -> tuple[str, list[str]]:
    """Returns the recipe's name and the overrides: a first argument with `=` is one of these.

    A mistyped key is found here.
    """
    if "=" in recipe:
        recipe, overrides = "default", [recipe, *(overrides or [])]
    refuse_mistyped_keys(overrides or [])
    return recipe, list(overrides or [])


def policy_overrides(policy: str, overrides: list[str] | None) -> list[str]:
    """Returns the overrides with the policy of a command's argument; raises where they name another."""
    given = list(overrides or [])
    for override in given:
        if override.startswith("policy.path="):
            raise ValueError(
                f"{override}: the argument {policy!r} says already which policy is meant; leave the "
                "override out, or give its value as the argument"
            )
    return [*given, f"policy.path={policy}"]


def parse_precision(text: str) -> Precision:
    """Returns the rollout precision that `--precision` names; raises with the choices where there is none."""
    try:
        return Precision(text)
    except ValueError:
        choices = ", ".join(Precision)
        raise ValueError(f"--precision {text!r}: must be one of {choices}") from None
