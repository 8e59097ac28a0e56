"""Checks of arguments from Python; the command line has only text."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any


def as_texts(name: str, given: Any) -> list[str]:
    """Returns the strings of a list argument; raises TypeError where it is not a list of strings."""
    if isinstance(given, str):
        raise TypeError(f"{name} = {given!r}: must be a list of texts; write [{given!r}]")
    if not isinstance(given, Iterable) or isinstance(given, bytes | dict):
        raise TypeError(f"{name} = {given!r}: must be a list of texts, and is a {type(given).__name__}")
    texts = list(given)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{name}: {text!r} is a {type(text).__name__}; must be a list of texts")
    return texts


def recipe_name(given: Any) -> str:
    """Returns the recipe's name or path as text; raises TypeError where it is neither."""
    if isinstance(given, str | Path):
        return str(given)
    raise TypeError(
        f"recipe is a {type(given).__name__}: must be the path of a YAML file or a shipped recipe's name; "
        "give single keys as overrides, such as load_config('default', ['run.steps=5']), and a dict of "
        "sections to paceline.config.parse_config"
    )
