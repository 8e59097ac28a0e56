"""A page of sections with charts, tables and preformatted text: what report, simulate and bench write."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.plots.chart import Chart
from paceline.plots.page import standalone_page


@dataclass(frozen=True)
class Section:
    """A part of a page with its own link at the top."""

    id: str
    title: str
    short: str = ""  # the link's text; empty: the title
    intro: str = ""
    charts: Sequence[Chart] = ()
    more: Sequence[Chart] = ()  # collapsed by default, after charts of nothing but zeros
    tables: Sequence[dict[str, Any]] = ()
    text: str = ""  # shown as it is, in columns

    def record(self) -> dict[str, Any]:
        quiet = [chart for chart in self.charts if chart.is_zero]
        return {
            "id": self.id,
            "title": self.title,
            "short": self.short or self.title,
            "intro": self.intro,
            "charts": [chart.record() for chart in self.charts if chart.has_data and not chart.is_zero],
            "more": [chart.record() for chart in (*quiet, *self.more) if chart.has_data],
            "tables": list(self.tables),
            "text": self.text,
        }


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


def document(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """Returns a page of sections that stands alone."""
    empty: dict[str, Any] = {name: [] for name in ("cards", "words", "tables", "tails", "samples")}
    data = empty | {"title": title, "subtitle": subtitle, "sections": [s.record() for s in sections]}
    return standalone_page(title, data, subtitle)
