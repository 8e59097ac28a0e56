"""The other side of `pool.py`: a process that calls reward functions and tools, one call at a time.

    parent ──▶ worker    [targets]             once
    worker ──▶ parent    Ready or LoadError    once
    parent ──▶ worker    (index, arguments)    per call
    worker ──▶ parent    Importing             when a call begins to import, and when it has
    worker ──▶ parent    [RewardResult], Observation, Done or Failed

It ends when the parent closes the connection or dies, even while a function hangs, and kills its descendants.
Signals that ask the run to stop are left to the parent: a scheduler sends them to every process, and the
current step still needs its rewards. A child that a function forks sends no reply.
"""

import inspect
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.tasks.base import Done, Observation, Problem, Turn
from paceline.tasks.rewards.channel import Channel, TooLong
from paceline.tasks.rewards.functions import (
    Failed,
    RewardResult,
    ScoringInput,
    Target,
    check_tool,
    keyword_arguments,
    load_function,
    read_result,
    wanted_arguments,
)
from paceline.tasks.rewards.import_watch import ImportWatch
from paceline.tasks.rewards.processes import adopt_orphans, end_descendants


@dataclass(frozen=True)
class Step:
    """A tool and how to call it: it gets the conversation so far and returns an observation or `Done`."""

    function: str
    options: dict[str, Any]
    time_limit: float  # seconds per call


@dataclass(frozen=True)
class Ready:
    """The reply of a worker that has loaded every target."""

    coroutines: tuple[bool, ...]  # per target: whether it runs in an event loop instead


@dataclass(frozen=True)
class LoadError:
    """The reply of a worker that could not load a target."""

    message: str


@dataclass(frozen=True)
class Importing:
    """Sent when a call begins or ends importing modules: its time limit is suspended meanwhile."""

    begins: bool


# A loaded target.
Call = Callable[[Any], Any]

# Processor seconds beyond the time limit after which the kernel kills a worker whose parent is gone.
PROCESSOR_GRACE_SECONDS = 5

# Seconds for a worker to import what it needs, at its start and within one call.
IMPORT_LIMIT_SECONDS = 300.0


# Signals that end or preempt a run; the worker leaves them to its parent.
PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(descriptor: int, parent: int, mark: str, memory_bytes: int) -> None:
    """Serves calls that come through the socket `descriptor`; `parent` is the parent's process id.

    `mark` is in the environment of this worker's descendants; `memory_bytes` = 0: no limit.
    """
    _leave_signals_to_parent()
    adopt_orphans()
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    os.set_inheritable(descriptor, False)  # a reward's child must not keep the connection open
    threading.Thread(target=_exit_with_parent, args=(parent, mark), daemon=True).start()
    channel = Channel(socket.socket(fileno=descriptor))
    os.register_at_fork(after_in_child=channel.close)
    try:
        Server(channel, memory_bytes).serve()
    except ConnectionError:  # the parent is gone
        end_descendants(mark)


class Server:
    """Answers the calls that come through a channel."""

    def __init__(self, channel: Channel, memory_bytes: int) -> None:
        self.channel = channel
        self.memory_bytes = memory_bytes
        self.pid = os.getpid()
        self.call = 0  # the number of the current call
        self.processor_seconds = 0.0  # limit of the current call

    def serve(self) -> None:
        targets: list[Target | Step] = self._receive()
        try:
            calls = [_prepare(target) for target in targets]
        except Exception as error:
            self.channel.send(0, LoadError(str(error)))
            return
        coroutines = (inspect.iscoroutinefunction(load_function(target.function)) for target in targets)
        self.channel.send(0, Ready(tuple(coroutines)))
        ImportWatch(self._imports).install()
        while True:
            index, arguments = self._receive()
            # Should the parent be killed while a function holds the interpreter's lock (a regular expression
            # that never ends), no thread of ours can react; the kernel can, by processor time.
            self.processor_seconds = (
                targets[index].time_limit * (os.cpu_count() or 1) + PROCESSOR_GRACE_SECONDS
            )
            signal.setitimer(signal.ITIMER_PROF, self.processor_seconds)
            reply = self._answer(calls[index], arguments)
            signal.setitimer(signal.ITIMER_PROF, 0)
            number, self.call = self.call, 0
            try:
                self.channel.send(number, reply)
            except TooLong as error:
                self.channel.send(number, Failed("error", f"returned too much: {error}"))

    def _receive(self) -> Any:
        message = self.channel.receive()
        assert message is not None, "without a time limit there is one, or an error"
        self.call = message.call
        return message.content

    def _answer(self, call: Call, arguments: Any) -> Any:
        try:
            reply = call(arguments)
        except MemoryError:
            limit = f"more than task.reward_memory_gb = {self.memory_bytes / 1e9:g}"
            reply = Failed("memory", f"needed {limit if self.memory_bytes else 'more memory than there is'}")
        except BaseException as error:  # also SystemExit: a reward must not end its worker by accident
            reply = Failed("error", _describe(error))
        if os.getpid() != self.pid:  # a child that the function forked, and that came back from it
            os._exit(0)
        return reply

    def _imports(self, begins: bool) -> None:
        if self.call:
            self.channel.send(self.call, Importing(begins))
            limit = IMPORT_LIMIT_SECONDS * (os.cpu_count() or 1) if begins else self.processor_seconds
            signal.setitimer(signal.ITIMER_PROF, limit)


def _leave_signals_to_parent() -> None:
    """Ignores the parent's signals here, and restores their defaults in processes started from here.

    A program that a function runs starts with the defaults by itself, a forked child restores them; during
    the fork they are blocked, because Python would lose one that arrives in between.
    """

    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)

    def restore() -> None:
        for number in PARENTS_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        unblock()

    for number in PARENTS_SIGNALS:
        signal.signal(number, lambda number, frame: None)
    unblock()  # the parent started us with them blocked
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore)


def _prepare(target: Target | Step) -> Call:
    function = load_function(target.function)
    if isinstance(target, Step):
        check_tool(function, target.options, target.function)
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


def _exit_with_parent(parent: int, mark: str) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    end_descendants(mark)
