"""Plants bugs: a mutant replaces a fragment of one function's source, in place, and takes it back.

The function object stays the same and only its code is exchanged, so that it does not matter who has imported
it. A fragment that is not there exactly once is an error: a mutant cannot go stale unnoticed.
"""

import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType


@dataclass(frozen=True)
class Mutant:
    """One bug: where it is planted, and which check must see it."""

    name: str  # what is wrong, in words
    target: str  # module:function, or module:Class.method
    old: str
    new: str
    caught_by: str  # a key of `checks.CHECKS`, or `path::test` of a test without fixtures

    @property
    def layer(self) -> str:
        """The package of the planted bug."""
        return self.target.partition(":")[0].split(".")[1]


def find(target: str) -> FunctionType:
    """Returns the plain function behind a name, without its decorators."""
    module, _, path = target.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    if isinstance(found, property):
        found = found.fget
    found = getattr(found, "__func__", found)
    return inspect.unwrap(found)


def _changed_code(function: FunctionType, old: str, new: str):
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__}: {old!r} occurs {source.count(old)} times"
    lines = source.replace(old, new).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("def "))
    made: dict[str, Callable] = {}
    code = compile("\n".join(lines[first:]), f"<mutant of {function.__qualname__}>", "exec")
    exec(code, function.__globals__, made)  # noqa: S102 - our own source with one fragment replaced
    return made[function.__name__].__code__


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Plants a bug for as long as the context lasts."""
    function = find(mutant.target)
    code = function.__code__
    function.__code__ = _changed_code(function, mutant.old, mutant.new)
    try:
        yield
    finally:
        function.__code__ = code
