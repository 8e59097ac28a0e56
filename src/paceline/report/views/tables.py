"""Tables as data: a title, columns, and rows of text."""

from collections.abc import Sequence
from typing import Any


def table(
    id: str,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    note: str = "",
    text: Sequence[int] = (),
) -> dict[str, Any]:
    """Returns a table as JSON takes it; `text` names the columns that hold words, by number."""
    record = {"id": id, "title": title, "columns": list(columns), "rows": [list(row) for row in rows]}
    return record | {"note": note, "text": list(text)}
