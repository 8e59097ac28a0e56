"""A page that shows how a rollout was paced: running requests, the strategy, expected and realised speed.

One self-contained HTML file with inline SVG: no script, nothing fetched.
"""

import html
from collections.abc import Sequence
from pathlib import Path

from paceline.pacing.trace import TraceRow, read_trace

# Width of the chart, in SVG units.
WIDTH = 960

# Margin left of the panels, for the axis labels.
LEFT = 64

# Margin right of the panels.
RIGHT = 12

# Margin above the first panel, for its title.
TOP = 24

# Margin below the last panel, for the step count.
BOTTOM = 30

# Height of a panel with a curve.
PANEL = 170

# Height of the panel with the strategies.
STRIP = 60

# Space between two panels.
GAP = 44

# Opacity of the steps of a trial.
TRIAL_OPACITY = 0.45

# Share of the realised rates that the axis covers: a few fast steps must not flatten the rest.
RATES_SHOWN = 0.98

# Colours of measured and expected curves.
DARK = "#1b2733"
ORANGE = "#e07b39"

# Colours of the strategies, in their order.
COLOURS = ("#9aa5b1", "#2f6fde", "#e07b39", "#2a9d6f", "#b04fc4", "#c9a227", "#d1495b", "#3aa7b8", "#7a6a53")

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 32px auto; max-width: 1000px; color: #1b2733; }
h1 { font-size: 20px; } h2 { font-size: 16px; margin-top: 32px; }
table { border-collapse: collapse; }
th, td { text-align: right; padding: 2px 14px 2px 0; }
th:first-child, td:first-child { text-align: left; }
text { font: 11px system-ui, sans-serif; fill: #52606d; } .axis { stroke: #cbd2d9; }
.key { display: inline-block; width: 10px; height: 10px; margin-right: 6px; }
"""

# Left and right end of a row of the trace, in SVG units.
Span = tuple[float, float]


def write_page(trace_path: Path, out: Path, title: str, step: int | None = None) -> int:
    """Writes the page of one step's rollout, by default the last; returns which step it is."""
    steps = read_trace(trace_path)
    if not steps:
        raise FileNotFoundError(
            f"{trace_path} holds no trace: this run has not finished a rollout, or its backend does not trace"
        )
    chosen = max(steps) if step is None else step
    if chosen not in steps:
        raise ValueError(f"--step {chosen}: {trace_path} has steps {min(steps)} to {max(steps)}")
    out.write_text(render(title, chosen, steps[chosen]))
    return chosen


def render(title: str, step: int, rows: Sequence[TraceRow]) -> str:
    """Returns the page as HTML."""
    rows = [row for row in rows if row.steps]
    # Plain decoding, which has no drafter, comes first.
    strategies = {row.decision.strategy for row in rows}
    names = [str(s) for s in sorted(strategies, key=lambda s: (s.drafter, s.tree, s.count))]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    steps = sum(row.steps for row in rows)
    tokens = sum(row.tokens for row in rows)
    seconds = sum(row.seconds for row in rows)
    totals = f"{steps} steps, {tokens} tokens, {seconds:.3g} s, {tokens / max(seconds, 1e-9):.0f} tokens/s"
    body = [
        f"<h1>{html.escape(title)}: rollout of step {step}</h1><p>{totals}</p>",
        _chart(rows, colours),
        "<h2>By strategy</h2>",
        _table(rows, names, colours),
        "<p>Trials are short runs of a strategy that is not in use, "
        "to see what its drafter gains or how long it takes. "
        "Time is that of the steps; prefill between them counts to the step that follows it.</p>",
    ]
    head = (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
    )
    return f"{head}<body>{''.join(body)}</body></html>\n"


def _chart(rows: Sequence[TraceRow], colours: dict[str, str]) -> str:
    """Draws three panels over the decode steps: running requests, the strategy, tokens per second."""
    strip_top = TOP + PANEL + GAP
    rates_top = strip_top + STRIP + GAP
    height = rates_top + PANEL + BOTTOM
    spans = _spans(rows)
    most = max(row.running for row in rows)
    steps = sum(row.steps for row in rows)
    return "".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" '
            'aria-label="pacing over the rollout">',
            _frame(TOP, PANEL, "running requests", most),
            _line(spans, [row.running for row in rows], most, TOP, PANEL, DARK),
            f'<text x="{LEFT}" y="{strip_top - 6}">strategy (faint: a trial)</text>',
            *(_strategy(span, row, strip_top, colours) for span, row in zip(spans, rows, strict=True)),
            _rates(rows, spans, rates_top),
            f'<text x="{WIDTH - RIGHT}" y="{height - 8}" text-anchor="end">decode step {steps}</text></svg>',
        ]
    )


def _spans(rows: Sequence[TraceRow]) -> list[Span]:
    """Returns where each row lies on the axis of decode steps."""
    scale = (WIDTH - LEFT - RIGHT) / max(1, sum(row.steps for row in rows))
    spans = []
    start = 0
    for row in rows:
        stop = start + row.steps
        spans.append((LEFT + start * scale, LEFT + stop * scale))
        start = stop
    return spans


def _strategy(span: Span, row: TraceRow, top: float, colours: dict[str, str]) -> str:
    """Draws a row's strategy as a bar, with its figures as a tooltip."""
    left, right = span
    decision = row.decision
    name = str(decision.strategy)
    opacity = TRIAL_OPACITY if decision.reason == "trial" else 1.0
    tip = (
        f"{name} ({decision.reason}), {row.running:.0f} running, context {decision.context:.0f}, "
        f"{row.steps} steps, {row.tokens} tokens in {1e3 * row.seconds:.1f} ms, "
        f"{decision.expected:.0f} tokens/s expected"
    )
    return (
        f'<rect x="{left:.2f}" y="{top}" width="{max(0.5, right - left):.2f}" height="{STRIP}" '
        f'fill="{colours[name]}" fill-opacity="{opacity}"><title>{html.escape(tip)}</title></rect>'
    )


def _rates(rows: Sequence[TraceRow], spans: list[Span], top: float) -> str:
    """Draws realised and expected tokens per second."""
    rates = [row.realised for row in rows]
    highest = max([*sorted(rates)[: max(1, int(RATES_SHOWN * len(rates)))], 1e-9])
    parts = [
        _frame(top, PANEL, "tokens/s: realised (dark), expected (orange)", highest),
        _line(spans, rates, highest, top, PANEL, DARK),
    ]
    known = [(span, row.decision.expected) for span, row in zip(spans, rows, strict=True)]
    known = [(span, expected) for span, expected in known if expected > 0]
    if known:
        expected = [value for _, value in known]
        parts.append(_line([span for span, _ in known], expected, highest, top, PANEL, ORANGE))
    return "".join(parts)


def _frame(top: float, height: float, label: str, most: float) -> str:
    """Draws a panel's title and axes."""
    return (
        f'<text x="{LEFT}" y="{top - 6}">{html.escape(label)}</text>'
        f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end">{most:.4g}</text>'
        f'<text x="{LEFT - 6}" y="{top + height}" text-anchor="end">0</text>'
        f'<path class="axis" fill="none" d="M{LEFT} {top}V{top + height}H{WIDTH - RIGHT}"/>'
    )


def _line(spans: list[Span], values: list[float], most: float, top: float, height: float, colour: str) -> str:
    """Draws values as a staircase over their spans."""
    points = []
    for (left, right), value in zip(spans, values, strict=True):
        y = top + height * (1 - min(value, most) / most)
        points += [f"{left:.2f},{y:.2f}", f"{right:.2f},{y:.2f}"]
    return f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{" ".join(points)}"/>'


def _table(rows: Sequence[TraceRow], names: list[str], colours: dict[str, str]) -> str:
    """Tabulates steps, time and tokens by strategy."""
    lines = [
        "<table><tr><th>strategy<th>steps<th>of these trials<th>share of time"
        "<th>tokens/row/step<th>tokens/s</tr>"
    ]
    seconds = sum(row.seconds for row in rows) or 1e-9
    for name in names:
        own = [row for row in rows if str(row.decision.strategy) == name]
        spent = sum(r.seconds for r in own)
        tokens = sum(r.tokens for r in own)
        trials = sum(r.steps for r in own if r.decision.reason == "trial")
        key = f'<span class="key" style="background:{colours[name]}"></span>'
        lines.append(
            f"<tr><td>{key}{html.escape(name)}<td>{sum(r.steps for r in own)}<td>{trials}"
            f"<td>{100 * spent / seconds:.1f}%<td>{tokens / max(1, sum(r.rows for r in own)):.2f}"
            f"<td>{tokens / max(spent, 1e-9):.0f}</tr>"
        )
    return "".join([*lines, "</table>"])
