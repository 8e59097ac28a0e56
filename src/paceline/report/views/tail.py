"""The long tail of one step's rollout: running requests, strategies, accept length and speed over time."""

from collections.abc import Sequence
from typing import Any

from paceline.pacing.trace import TraceRow
from paceline.plots.chart import Axis, Chart, Series, Span
from paceline.plots.document import table

TIME = Axis("time since the rollout's first decode step", "s")

# Rows of a step that are drawn; neighbours are merged where there are more.
MOST_ROWS = 400

# The palette's grey; the colours before it are for drafters.
PLAIN_COLOUR = 8

# Share of the realised rates that sets the axis: a few fast steps must not flatten the rest.
RATES_SHOWN = 0.98


def tail_view(rows: Sequence[TraceRow]) -> dict[str, Any]:
    rows = [row for row in rows if row.steps]
    drawn = merged(rows)
    return {
        "charts": [chart.record() for chart in tail_charts(drawn)],
        "tables": [by_strategy(rows)] if rows else [],
    }


def tail_charts(rows: Sequence[TraceRow]) -> list[Chart]:
    """Returns three charts over the seconds of a rollout."""
    if not rows:
        return []
    starts = [0.0]
    for row in rows:
        starts.append(starts[-1] + row.seconds)
    names = [name for name in strategy_names(rows) if name != "plain"]
    spans = [
        Span(
            start,
            stop,
            name,
            PLAIN_COLOUR if name == "plain" else names.index(name) % PLAIN_COLOUR,
            row.decision.reason == "trial",
        )
        for start, stop, row in zip(starts, starts[1:], rows, strict=False)
        for name in (str(row.decision.strategy),)
    ]

    def stairs(label: str, values: list[float | None], colour: int, dash: int = 0) -> Series:
        return Series(label, [*values, values[-1]], colour=colour, dash=dash, stairs=True)

    rates = [row.realised for row in rows]
    highest = max([*sorted(rates)[: max(1, int(RATES_SHOWN * len(rates)))], 1e-9])
    shown = [min(rate, highest * 1.1) for rate in rates]
    expected = [min(row.decision.expected, highest * 1.1) or None for row in rows]
    speed = [stairs("realised", list(shown), -1)]
    if any(expected):
        speed.append(stairs("expected by the pacer", expected, 5, 1))
    return [
        Chart(
            "tail-running",
            "Running requests",
            TIME,
            Axis("requests", low=0.0),
            starts,
            [stairs("running", [row.running for row in rows], -1)],
            "Colours: the strategy in use.",
            spans=spans,
        ),
        Chart(
            "tail-accept",
            "Tokens per request and decode step",
            TIME,
            Axis("accept length", "tokens", low=1.0),
            starts,
            [stairs("tokens per step", [row.tokens / max(1, row.rows) for row in rows], -1)],
            "1 is plain decoding.",
            spans=spans,
        ),
        Chart(
            "tail-speed",
            "Speed",
            TIME,
            Axis("speed", "tokens/s", low=0.0),
            starts,
            speed,
            "The fastest 2% of the stretches are cut off.",
            spans=spans,
        ),
    ]


def strategy_names(rows: Sequence[TraceRow]) -> list[str]:
    """Returns the strategies in use, plain decoding first, then by drafter and length."""
    strategies = {row.decision.strategy for row in rows}  # plain decoding has no drafter, so it is first
    return [str(s) for s in sorted(strategies, key=lambda s: (s.drafter, s.tree, s.count))]


def by_strategy(rows: Sequence[TraceRow]) -> dict[str, Any]:
    seconds = sum(row.seconds for row in rows) or 1e-9
    lines = []
    for name in strategy_names(rows):
        own = [row for row in rows if str(row.decision.strategy) == name]
        spent = sum(row.seconds for row in own)
        tokens = sum(row.tokens for row in own)
        trials = sum(row.steps for row in own if row.decision.reason == "trial")
        steps = sum(row.steps for row in own)
        per_row = tokens / max(1, sum(row.rows for row in own))
        cells = (f"{steps}", f"{trials}", f"{100 * spent / seconds:.1f}%", f"{per_row:.2f}")
        lines.append([name, *cells, f"{tokens / max(spent, 1e-9):.0f}"])
    columns = ["strategy", "decode steps", "of these trials", "share of time", "tokens per request and step"]
    note = (
        "Trials are short runs of a strategy that is not in use, to see what its drafter gains or how "
        "long it takes. Time is that of the steps; prefill between them counts to the step that follows it."
    )
    return table("strategies", "By strategy", [*columns, "tokens/s"], lines, note)


def merged(rows: Sequence[TraceRow], limit: int = MOST_ROWS) -> list[TraceRow]:
    """Returns at most about `limit` rows: neighbours are added up, under the decision that took longest."""
    if len(rows) <= limit:
        return list(rows)
    shorter = []
    for number in range(limit):
        part = rows[number * len(rows) // limit : (number + 1) * len(rows) // limit]
        longest = max(part, key=lambda row: row.seconds)
        whole = TraceRow(longest.decision)
        for row in part:
            whole.steps += row.steps
            whole.rows += row.rows
            whole.tokens += row.tokens
            whole.seconds += row.seconds
        shorter.append(whole)
    return shorter
