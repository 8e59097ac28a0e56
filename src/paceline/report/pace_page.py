"""A page that shows how one rollout was paced, for `paceline bench pacing`: there is no run around it."""

from collections.abc import Sequence

from paceline.pacing.trace import TraceRow
from paceline.plots.document import Section, document
from paceline.report.views.tail import by_strategy, merged, tail_charts


def render(title: str, step: int, rows: Sequence[TraceRow]) -> str:
    """Returns the page as HTML."""
    rows = [row for row in rows if row.steps]
    steps = sum(row.steps for row in rows)
    tokens = sum(row.tokens for row in rows)
    seconds = sum(row.seconds for row in rows)
    totals = f"{steps} steps, {tokens} tokens, {seconds:.3g} s, {tokens / max(seconds, 1e-9):.0f} tokens/s"
    section = Section(
        "rollout", f"Rollout of step {step}", charts=tail_charts(merged(rows)), tables=[by_strategy(rows)]
    )
    return document(title, totals, [section])
