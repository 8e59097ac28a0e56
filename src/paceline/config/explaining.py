"""Validation errors of a recipe as sentences that name the key, its value and the way out."""

import difflib
import math
import types
from enum import Enum
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic_core import ErrorDetails

from paceline.config.recipe import Config, flatten


def explain(problem: ErrorDetails, root: type[BaseModel] = Config) -> str:
    """Returns one validation problem as a sentence: key, value, what is allowed, nearest match.

    `root` is the validated section.
    """
    path = [str(part) for part in problem["loc"]]
    key = ".".join(path) or "recipe"
    if problem["type"] == "extra_forbidden":
        allowed = _fields_at(path[:-1], root)
        near = difflib.get_close_matches(path[-1], allowed, n=1, cutoff=0.5)
        elsewhere = [k for k in flatten(root().model_dump()) if k.rsplit(".", 1)[-1] == path[-1]]
        nearest = ".".join([*path[:-1], near[0]]) if near else (elsewhere[0] if elsewhere else None)
        hint = f" Did you mean {nearest!r}?" if nearest else ""
        return f"{key}: there is no such key.{hint} Allowed here: {', '.join(allowed)}."
    value = problem.get("input")
    message = problem["msg"].removeprefix("Value error, ")
    shown = f" = {value!r}" if path and not isinstance(value, dict | BaseModel) else ""
    hint = ""
    if problem["type"] in ("literal_error", "enum"):
        choices = _choices_at(path, root)
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        message = f"must be one of {', '.join(choices)}"
    if problem["type"] == "string_type":
        message = "must be text; write it in quotes"
    if problem["type"] == "less_than_equal":
        message = f"must be at most {problem['ctx']['le']:.15g}"
    if problem["type"] == "list_type":
        message = f"must be a list; write [{_as_entry(path, value, root)}]"
    if problem["type"] == "model_type":
        keys = ", ".join(_fields_at(path, root))
        message = f"is a section, with the keys {keys}"
        if path[-1].isdigit() and isinstance(value, str):
            message = f"is a section; write {_as_entry(path[:-1], value, root)}; its keys are {keys}"
    if message.startswith(f"{key}."):  # a section's own check names the key itself
        return f"{message}."
    return f"{key}{shown}: {message}.{hint}"


def _as_entry(path: list[str], value: Any, root: type[BaseModel]) -> str:
    """Returns how a value is written in the list at `path`; text for a section becomes its first key's."""
    fields = _fields_at([*path, "0"], root)
    if not fields or not isinstance(value, str):
        return str(value)
    return yaml.safe_dump({fields[0]: value}, default_flow_style=True, width=math.inf).strip()


def _type_at(path: list[str], root: type[BaseModel]) -> Any:
    """Returns the type of a key or of a list's entry; for a path into a value, the value's type."""
    kind: Any = root
    for part in path:
        if get_origin(kind) is list and part.isdigit():
            kind = get_args(kind)[0]
        elif _is_section(kind):
            field = kind.model_fields.get(part)
            kind = field.annotation if field is not None else None
        else:
            break
    return kind


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def takes_text(key: str, root: type[BaseModel]) -> bool:
    kind = _type_at(key.split("."), root)
    members = get_args(kind) if get_origin(kind) is types.UnionType else (kind,)
    return set(members) - {types.NoneType} == {str}


def _fields_at(path: list[str], root: type[BaseModel]) -> list[str]:
    kind = _type_at(path, root)
    return list(kind.model_fields) if _is_section(kind) else []


def _choices_at(path: list[str], root: type[BaseModel]) -> list[str]:
    kind = _type_at(path, root)
    if get_origin(kind) is types.UnionType:
        kind = next(arg for arg in get_args(kind) if get_origin(arg) is Literal)
    if get_origin(kind) is list:
        kind = get_args(kind)[0]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(member.value) for member in kind]
    return [str(choice) for choice in get_args(kind)]
