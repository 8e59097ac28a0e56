"""docs/architecture.md says which room may import which; this reads the imports and holds it to that."""

import ast
import re
from pathlib import Path

import paceline

SOURCE = Path(paceline.__file__).parent
TABLE = Path(__file__).parents[1] / "docs" / "architecture.md"
CONTRACT = "backends/base.py"  # the contract stands apart from what implements it


def room_of(parts: tuple[str, ...]) -> str:
    if parts[:2] == ("backends", "base"):
        return CONTRACT
    return f"{parts[0]}/" if (SOURCE / parts[0]).is_dir() else f"{parts[0]}.py"


def imported(file: Path) -> set[str]:
    """Rooms that a file imports from when it is itself imported, or later inside a function."""
    modules = [
        node.module
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
    ]
    return {room_of(tuple(module.split(".")[1:])) for module in modules if module.startswith("paceline.")}


def allowed() -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            for room in re.findall(r"`([^`]+)`", cells[0]):
                rooms[room] = set(re.findall(r"`([^`]+)`", cells[2]))
    return rooms


def test_rooms_import_what_the_table_allows():
    table = allowed()
    assert len(table) > 20
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        if file.name in ("commands.py", "cli.py", "loop.py", "api.py", "__init__.py", "__main__.py"):
            continue  # entry points put everything together
        room = room_of(parts)
        extra = imported(file) - {room} - table[room]
        assert not extra, (
            f"{file.relative_to(SOURCE)} ({room}) imports from {', '.join(sorted(extra))}: not in docs/architecture.md's table"
        )


def test_promises_of_the_table():
    """What the design asks for, whatever the table says."""
    table = allowed()
    assert table["kernels/"] == set() and table["pacing/"] == set() and table["config/"] == set()
    assert (
        "learning/" not in table["engine/"]
        and "engine/" not in table["drafting/"]
        and "engine/" not in table["learning/"]
    )
