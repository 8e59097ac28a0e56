"""A whole tiny run to compare with, and commands in forked processes."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import ForkedCommand
from tests.loop_helpers import make_tiny_policy, tiny_overrides

# On top of `tiny_overrides`: six steps within a second.
SMALL = [
    "rollout.prompts_per_step=2",
    "rollout.max_tokens=8",
    "eval.max_tokens=8",
    "task.eval_problems=4",
]


@pytest.fixture(scope="session")
def policy(tmp_path_factory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def whole(policy, tmp_path_factory) -> Path:
    """The run that every interrupted one must equal."""
    root = tmp_path_factory.mktemp("runs")
    command = ForkedCommand(["train", *tiny_overrides(policy, root, "whole"), *SMALL], root / "output")
    assert command.wait() == 0, command.text()
    return root / "whole"


@pytest.fixture
def start(tmp_path) -> Callable[..., ForkedCommand]:
    """Starts `paceline ...`; whatever still runs at the end of the test is killed."""
    started: list[ForkedCommand] = []

    def run(*arguments: str, prepare: Callable[[], None] = lambda: None) -> ForkedCommand:
        started.append(ForkedCommand(list(arguments), tmp_path / f"output-{len(started)}", prepare))
        return started[-1]

    yield run
    for command in started:
        if command.code is None:
            command.send(9)
            command.wait()


@pytest.fixture
def train(start, policy, tmp_path) -> Callable[..., ForkedCommand]:
    """Starts a new tiny run of the given name."""

    def run(name: str, *extra: str, prepare: Callable[[], None] = lambda: None) -> ForkedCommand:
        return start("train", *tiny_overrides(policy, tmp_path, name), *SMALL, *extra, prepare=prepare)

    return run


def signal_self_in(owner, name: str, number: int = signal.SIGTERM, at_call: int = 1) -> Callable[[], None]:
    """Returns a `prepare` that has the process send itself a signal as it enters a function."""

    def prepare() -> None:
        real = getattr(owner, name)
        calls = []

        def entered(*arguments, **more):
            calls.append(None)
            if len(calls) == at_call:
                os.kill(os.getpid(), number)
            return real(*arguments, **more)

        setattr(owner, name, entered)

    return prepare
