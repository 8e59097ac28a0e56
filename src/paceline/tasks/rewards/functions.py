"""Reward functions by name: importing them, passing the arguments they take, reading what they return.

A function takes what it needs by parameter name:

    def reward(response, answer): return float(answer in response)

It may return a number, or {"score": number, "correct": bool}. verl's argument names are understood as well.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from paceline.tasks.base import Problem, Response
from paceline.tasks.extract import extract

# A larger score is a mistake: its square, summed over a step, must be finite in float32.
MAX_SCORE = 1e6

# The built-in scorers by their recipe names.
BUILTIN = {
    "exact": "paceline.tasks.rewards.scorers:exact",
    "last-number": "paceline.tasks.rewards.scorers:last_number",
    "math-verify": "paceline.tasks.rewards.math_scorer:math_verify",
}

# What a reward function may take, by parameter name. The last four are verl's.
ARGUMENTS: dict[str, Callable[[Problem, Response, str], Any]] = {
    "prompt": lambda problem, response, how: problem.prompt,
    "response": lambda problem, response, how: response.text,
    "answer": lambda problem, response, how: problem.answer,
    "extracted": lambda problem, response, how: extract(response.text, how),
    "truncated": lambda problem, response, how: response.truncated,
    "conversation": lambda problem, response, how: response.conversation,
    "extra": lambda problem, response, how: problem.extra,
    "solution_str": lambda problem, response, how: response.text,
    "ground_truth": lambda problem, response, how: problem.answer,
    "data_source": lambda problem, response, how: problem.extra.get("data_source", ""),
    "extra_info": lambda problem, response, how: problem.extra.get("extra_info") or {},
}


# TRL's names for lists of them.
TRL_ARGUMENTS = {"prompts": "prompt", "completions": "response"}


@dataclass(frozen=True)
class Target:
    """A reward function and how to call it; it is sent to the worker processes."""

    function: str  # module:function or path/to/file.py:function
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    time_limit: float = 10.0  # seconds per call
    batch: bool = False  # the function takes lists
    extraction: str = "whole"  # how `extracted` is found: `task.extract`


@dataclass(frozen=True)
class RewardResult:
    """The result of one reward for one response."""

    score: float
    correct: bool
    components: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """Why a call has no result; the reason becomes part of a metric's name."""

    reason: str  # error, timeout, memory, died
    message: str


# A problem with the response to score.
ScoringInput = tuple[Problem, Response]

# What one call returns: a result per response, or why there is none.
Reply = list[RewardResult] | Failed


@cache
def load_function(name: str) -> Callable[..., Any]:
    """Imports `module:function` or `path/to/file.py:function`.

    Raises ValueError with the way out, including what the user's module raises on import.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise ValueError(
            f"{name!r} is neither one of {', '.join(BUILTIN)} nor of the form "
            "module:function or path/to/file.py:function"
        )
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    except Exception as error:
        raise ValueError(f"{name!r}: {where} cannot be imported ({type(error).__name__}: {error})") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and not key.startswith("_")
        ]
        raise ValueError(
            f"{name!r}: {where} has no function {attribute!r}; it has {', '.join(public) or 'none'}"
        )
    return function


def _load_module(name: str) -> Any:
    if str(Path.cwd()) not in sys.path:  # a console script's sys.path lacks the current folder
        sys.path.append(str(Path.cwd()))
    return importlib.import_module(name)


def _load_file(path: Path) -> Any:
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = f"paceline_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"{path} is a file of Python"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up by name
    spec.loader.exec_module(module)
    return module


def check_tool(function: Callable[..., Any], options: Mapping[str, Any], name: str) -> None:
    """Raises ValueError where a function's signature is not that of a tool."""
    if inspect.iscoroutinefunction(function):
        return  # refused elsewhere, for being a coroutine
    try:
        inspect.signature(function).bind(None, None, **options)
    except TypeError as error:
        called = ", ".join(("problem, conversation", *(f"{key}=..." for key in options)))
        raise ValueError(f"{name!r} is called with ({called}) and cannot be: {error}") from None


def wanted_arguments(function: Callable[..., Any], options: Mapping[str, Any], name: str) -> list[str]:
    """Returns which of ARGUMENTS the function takes; raises ValueError where they do not suffice."""
    parameters = inspect.signature(function).parameters.values()
    known = ARGUMENTS.keys() | options.keys()
    by_position = [
        p.name
        for p in parameters
        if p.kind is p.POSITIONAL_ONLY or (p.kind is p.VAR_POSITIONAL and p.name in known)
    ]
    if by_position:
        raise ValueError(
            f"{name!r} takes {', '.join(by_position)} by position alone; "
            "a reward is called by name: write it without `/` or `*`"
        )
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    unknown = [parameter for parameter in needed if parameter not in known]
    if unknown:
        plural = [f"`{plural}` is `{one}` here" for plural, one in TRL_ARGUMENTS.items() if plural in unknown]
        lists = f". As in TRL? {', '.join(plural)}, with `batch: true` a list of them" if plural else ""
        raise ValueError(
            f"{name!r} wants {', '.join(unknown)}; "
            f"a reward can have {', '.join(ARGUMENTS)} and its own `options`{lists}"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return list(ARGUMENTS)
    takes = [p.name for p in parameters]
    surplus = [key for key in options if key not in takes]
    if surplus:
        raise ValueError(
            f"{name!r} does not take the options {', '.join(surplus)}; its parameters are {', '.join(takes)}"
        )
    return [argument for argument in ARGUMENTS if argument in takes]


def keyword_arguments(
    target: Target, wanted: Sequence[str], inputs: Sequence[ScoringInput]
) -> dict[str, Any]:
    """Returns the arguments of one call: lists for a batch, otherwise those of the only input."""
    values = {
        name: [ARGUMENTS[name](problem, response, target.extraction) for problem, response in inputs]
        for name in wanted
    }
    return (values if target.batch else {name: value[0] for name, value in values.items()}) | target.options


def read_result(target: Target, result: Any, count: int) -> list[RewardResult]:
    """Parses what a function returned into one `RewardResult` per response; raises where it is malformed."""
    results = list(result) if target.batch else [result]
    if len(results) != count:
        raise ValueError(f"returned {len(results)} scores for {count} responses")
    return [_read_one(entry) for entry in results]


def _read_one(entry: Any) -> RewardResult:
    correct = None
    if isinstance(entry, Mapping):
        correct = entry.get("correct")
        entry = entry["score"]
    if isinstance(entry, str | bytes):  # `float` would parse it
        raise TypeError(f"returned the text {entry!r}; a score is a number")
    score = check_score(float(entry))
    return RewardResult(score, score >= 1.0 if correct is None else bool(correct))


def check_score(score: float) -> float:
    """Returns the score; raises ValueError where it is not finite or beyond `MAX_SCORE`."""
    if not abs(score) <= MAX_SCORE:  # also NaN
        raise ValueError(f"returned {score:g}; a score must lie between {-MAX_SCORE:g} and {MAX_SCORE:g}")
    return score
