"""docs/architecture.md says which package may import which; this reads the imports and holds them to that."""

import ast
import functools
import re
from graphlib import TopologicalSorter
from pathlib import Path

import paceline

SOURCE = Path(paceline.__file__).parent
TABLE = Path(__file__).parents[1] / "docs" / "architecture.md"
EVERYTHING = "cli/"  # the command line puts everything together


def package_of(parts: tuple[str, ...]) -> str:
    return f"{parts[0]}/" if (SOURCE / parts[0]).is_dir() else f"{parts[0]}.py"


@functools.cache
def imported(file: Path) -> set[str]:
    """Returns the packages that a file imports when it is itself imported, or later inside a function."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    modules = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    modules += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [
        f"paceline.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == "paceline"
        for alias in node.names
        if not alias.name.startswith("_")
    ]
    return {package_of(tuple(name.split(".")[1:])) for name in modules if name.startswith("paceline.")}


def allowed() -> dict[str, set[str]]:
    packages: dict[str, set[str]] = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            packages[cells[0].strip("`")] = set(re.findall(r"`([^`]+)`", cells[2]))
    return packages


def test_packages_import_what_the_table_allows():
    table = allowed()
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        if parts[0] in ("__init__", "__main__"):
            continue
        package = package_of(parts)
        assert package in table, f"{package} is missing in docs/architecture.md's table"
        if package == EVERYTHING:
            continue
        extra = imported(file) - {package} - table[package]
        assert not extra, (
            f"{file.relative_to(SOURCE)} imports {', '.join(sorted(extra))}: "
            "not in docs/architecture.md's table"
        )


def test_table_of_imports_allows_no_more_than_is_used():
    used: dict[str, set[str]] = {}
    for file in SOURCE.rglob("*.py"):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        if parts[0] not in ("__init__", "__main__"):
            used.setdefault(package_of(parts), set()).update(imported(file))
    for package, permitted in allowed().items():
        if package != EVERYTHING:
            assert not permitted - used[package], f"{package} no longer imports {permitted - used[package]}"


def test_packages_import_only_what_stands_below_them():
    """The table's rows are in order: a package imports only what stands below it, so there is no cycle."""
    table = allowed()
    order = list(table)
    for package, permitted in table.items():
        for other in permitted:
            assert order.index(other) > order.index(package), (
                f"{package} imports {other}, which stands above it"
            )
    TopologicalSorter(table).prepare()  # raises CycleError


def test_table_of_imports_keeps_the_promises_of_the_design():
    """What the design asks for, whatever the table says."""
    table = allowed()
    assert table["kernels/"] == set() and table["pacing/"] == set() and table["types.py"] == set()
    assert "learning/" not in table["engine/"] and "engine/" not in table["drafting/"]
    assert "engine/" not in table["learning/"] and "session.py" not in table["engine/"]
    assert not any("cli/" in permitted for permitted in table.values())
