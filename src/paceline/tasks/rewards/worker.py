"""The other side of `pool.py`: a process that calls reward functions and tools, one call at a time.

    parent ──▶ worker    [targets]             once
    worker ──▶ parent    Ready or LoadError    once
    parent ──▶ worker    (index, arguments)    per call
    worker ──▶ parent    [RewardResult], Observation, Done or Failed

It ends when the parent closes the connection or dies, even while a function hangs.
"""

import inspect
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from paceline.tasks.base import Done, Observation, Problem, Turn
from paceline.tasks.rewards.functions import (
    Failed,
    RewardResult,
    ScoringInput,
    Target,
    keyword_arguments,
    load_function,
    read_result,
    wanted_arguments,
)


@dataclass(frozen=True)
class Step:
    """A tool and how to call it: it gets the conversation so far and returns an observation or `Done`."""

    function: str
    options: dict[str, Any]
    time_limit: float  # seconds per call


@dataclass(frozen=True)
class Ready:
    """The reply of a worker that has loaded every target."""

    coroutines: tuple[bool, ...]  # per target: it belongs into an event loop, not here


@dataclass(frozen=True)
class LoadError:
    """The reply of a worker that could not load a target."""

    message: str


# A loaded target.
Call = Callable[[Any], Any]

# Processor seconds beyond the time limit after which the kernel ends a worker that nobody watches.
PROCESSOR_GRACE_SECONDS = 5


def main(descriptor: int, parent: int) -> None:
    """Serves calls that come through the connection `descriptor`; `parent` is the parent's process id."""
    os.set_inheritable(descriptor, False)  # what a reward starts must not keep the connection open
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    connection = Connection(descriptor)
    try:
        targets: list[Target | Step] = connection.recv()
        try:
            calls = [_prepare(target) for target in targets]
        except Exception as error:
            connection.send(LoadError(str(error)))
            return
        connection.send(
            Ready(tuple(inspect.iscoroutinefunction(load_function(target.function)) for target in targets))
        )
        while True:
            index, arguments = connection.recv()
            # Should the parent be killed while a function holds the interpreter's lock (a regular expression
            # that never ends), no thread of ours can react; the kernel can, by processor time.
            processor_seconds = targets[index].time_limit * (os.cpu_count() or 1) + PROCESSOR_GRACE_SECONDS
            signal.setitimer(signal.ITIMER_PROF, processor_seconds)
            try:
                reply = calls[index](arguments)
            except BaseException as error:  # also SystemExit: a reward must not end its worker by accident
                reply = Failed("error", _describe(error))
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(reply)
    except (EOFError, ConnectionError):
        return


def _prepare(target: Target | Step) -> Call:
    function = load_function(target.function)
    if isinstance(target, Step):
        return lambda arguments: _step(function, target, *arguments)
    wanted = wanted_arguments(function, target.options, target.function)
    return lambda inputs: _reward(function, target, wanted, inputs)


def _reward(
    function: Callable[..., Any], target: Target, wanted: list[str], inputs: list[ScoringInput]
) -> list[RewardResult]:
    return read_result(target, function(**keyword_arguments(target, wanted, inputs)), len(inputs))


def _step(
    function: Callable[..., Any], target: Step, problem: Problem, conversation: tuple[Turn, ...]
) -> Observation | Done:
    result = function(problem, conversation, **target.options)
    if not isinstance(result, Observation | Done):
        raise TypeError(
            f"a step must return Observation or Done (paceline.tasks.base), not {type(result).__name__}"
        )
    if (
        isinstance(result, Observation)
        and not isinstance(result.content, str)
        and not _are_messages(result.content)
    ):
        raise TypeError(
            f"an observation must be text or messages with `role` and `content`, not {result.content!r:.80}"
        )
    return result


def _are_messages(content: Any) -> bool:
    return (
        isinstance(content, tuple | list)
        and bool(content)
        and all(isinstance(message, dict) and "role" in message for message in content)
    )


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:500]}{where}"


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgid(0), signal.SIGKILL)  # with whatever the functions have started
