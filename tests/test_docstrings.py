"""Every public name of the package says what it is, in a docstring whose first line is a sentence.

Public is what does not begin with an underscore: modules, classes, functions, methods. A method that
overrides a documented one of a class or protocol in this package may leave it to that one. Functions within
functions and Triton's kernels (`_name_kernel`) are private.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "paceline"
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 110

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Outline:
    """A class as far as its docstrings go."""

    bases: list[str] = field(default_factory=list)
    # By method, and whether it has a docstring.
    methods: dict[str, bool] = field(default_factory=dict)

    @property
    def is_protocol(self) -> bool:
        return "Protocol" in self.bases


def outline(node: ast.ClassDef) -> Outline:
    names = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    bases = [base.attr if isinstance(base, ast.Attribute) else base.id for base in names]
    methods = {
        child.name: ast.get_docstring(child) is not None for child in node.body if isinstance(child, Function)
    }
    return Outline(bases, methods)


def outlines(trees: list[ast.Module]) -> dict[str, list[Outline]]:
    """Returns the package's classes by name; where two have the same, a base may be either."""
    found: dict[str, list[Outline]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(outline(node))
    return found


def documented_above(own: Outline, classes: dict[str, list[Outline]]) -> set[str]:
    """Returns the methods that a base class documents, or a protocol that a class implements unnamed."""
    protocols = [known for same in classes.values() for known in same if known.is_protocol]
    documented: set[str] = set()
    seen: list[Outline] = []
    todo = [own]
    while todo:
        current = todo.pop()
        seen.append(current)
        above = [base for name in current.bases for base in classes.get(name, [])]
        above += [protocol for protocol in protocols if protocol.methods.keys() <= current.methods.keys()]
        for base in above:
            documented |= {method for method, has_docstring in base.methods.items() if has_docstring}
        todo += [base for base in above if base not in seen and base not in todo]
    return documented


def public(nodes: list[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
    for node in nodes:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node


def is_setter(node: Function) -> bool:
    return any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in node.decorator_list)


def required(
    tree: ast.Module, classes: dict[str, list[Outline]]
) -> Iterator[tuple[str, ast.Module | Function | ast.ClassDef]]:
    """Yields what must have a docstring, with its name within the module."""
    yield "the module", tree
    todo: list[tuple[str, ast.ClassDef]] = []
    for node in public(tree.body):
        yield node.name, node
        if isinstance(node, ast.ClassDef):
            todo.append((node.name, node))
    while todo:
        prefix, owner = todo.pop(0)
        inherited = documented_above(outline(owner), classes)
        for node in public(owner.body):
            name = f"{prefix}.{node.name}"
            if isinstance(node, ast.ClassDef):
                todo.append((name, node))
            elif (node.name in inherited and ast.get_docstring(node) is None) or is_setter(node):
                continue
            yield name, node


def complaints(path: Path, tree: ast.Module, classes: dict[str, list[Outline]]) -> list[str]:
    lines = path.read_text().splitlines()
    found = []
    for name, node in required(tree, classes):
        where = f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)} {name}"
        text = ast.get_docstring(node)
        if text is None:
            found.append(f"{where}: no docstring")
            continue
        first = text.splitlines()[0] if text else ""
        line = lines[node.body[0].lineno - 1]
        if not first.endswith((".", ":", "?")):
            found.append(f"{where}: the first line is no sentence: {first!r}")
        if len(line) > LONGEST:
            found.append(f"{where}: the first line has {len(line)} columns")
    return found


TREES = {path: ast.parse(path.read_text()) for path in FILES}
CLASSES = outlines(list(TREES.values()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_public_name_has_a_sentence(path):
    found = complaints(path, TREES[path], CLASSES)
    assert not found, "\n".join(found)


def test_what_is_missing_is_found():
    tree = ast.parse(
        '"""A module."""\n'
        "def documented():\n"
        '    """Returns nothing."""\n'
        "def bare():\n"
        "    def inner(): pass\n"
        "def fragment():\n"
        '    """By name"""\n'
        "def _private(): pass\n"
        "class Base:\n"
        '    """A base."""\n'
        "    def said(self):\n"
        '        """Says it."""\n'
        "    def unsaid(self): pass\n"
        "class Derived(Base):\n"
        '    """A derived class."""\n'
        "    def __init__(self): pass\n"
        "    def said(self): pass\n"
        "    def unsaid(self): pass\n"
    )
    classes = outlines([tree])
    missing = [name for name, node in required(tree, classes) if ast.get_docstring(node) is None]
    assert missing == ["bare", "Base.unsaid", "Derived.unsaid"]
