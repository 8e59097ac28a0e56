"""Every module and every public class says what it is; whatever has a docstring begins it with a sentence.

Public is what does not begin with an underscore. Functions and methods have a docstring where their name does
not say it all, which no test can judge; what is defined within a function is private.
"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "paceline"

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def complaints(tree: ast.Module) -> list[str]:
    """Returns what is missing in a module, with its line."""
    found = []
    todo: list[Documented] = [tree]
    while todo:
        node = todo.pop(0)
        if isinstance(node, ast.Module | ast.ClassDef):
            todo += [child for child in node.body if isinstance(child, Documented)]
        name = getattr(node, "name", "the module")
        text = ast.get_docstring(node)
        if text is None:
            if isinstance(node, ast.Module) or isinstance(node, ast.ClassDef) and not name.startswith("_"):
                found.append(f"{getattr(node, 'lineno', 1)} {name}: no docstring")
        elif not text.partition("\n")[0].endswith((".", ":", "?")):
            found.append(f"{getattr(node, 'lineno', 1)} {name}: the first line is no sentence")
    return found


def test_modules_and_public_classes_have_docstrings():
    found = [
        f"{path.relative_to(PACKAGE)}:{complaint}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for complaint in complaints(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)


def test_complaints_name_missing_docstrings():
    tree = ast.parse(
        "def bare():\n"
        "    class Inner: pass\n"
        "def fragment():\n"
        '    """By name"""\n'
        "class Bare: pass\n"
        "class _Private: pass\n"
        "class Documented:\n"
        '    """A class\n\n    that is cut off."""\n'
    )
    assert complaints(tree) == [
        "1 the module: no docstring",
        "3 fragment: the first line is no sentence",
        "5 Bare: no docstring",
        "7 Documented: the first line is no sentence",
    ]
