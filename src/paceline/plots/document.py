"""A page of sections with charts, tables and preformatted text: what simulate and bench write."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.plots.chart import Chart
from paceline.plots.page import standalone_page

# Scripts that build a page from the record of `document_record`.
SCRIPTS = ("report.js", "embedded.js")


@dataclass(frozen=True)
class Section:
    """A part of a page with its own link at the top."""

    id: str
    title: str
    short: str = ""  # the link's text; empty: the title
    intro: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[dict[str, Any]] = ()
    text: str = ""  # shown as it is, in columns

    def record(self) -> dict[str, Any]:
        """Returns the section as JSON takes it."""
        return {
            "id": self.id,
            "title": self.title,
            "short": self.short or self.title,
            "intro": self.intro,
            "charts": [chart.record() for chart in self.charts if chart.has_data],
            "tables": list(self.tables),
            "text": self.text,
        }


def document_record(title: str, subtitle: str, sections: Sequence[Section]) -> dict[str, Any]:
    """Returns the record of a page that has nothing but sections."""
    empty: dict[str, Any] = {name: [] for name in ("cards", "words", "tables", "tails", "samples")}
    return empty | {"title": title, "subtitle": subtitle, "sections": [s.record() for s in sections]}


def document(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """Returns a page of sections that stands alone."""
    return standalone_page(title, document_record(title, subtitle, sections), SCRIPTS, subtitle)
