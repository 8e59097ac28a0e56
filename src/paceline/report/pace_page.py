"""A page that shows how a rollout was paced: who ran, what was chosen, and what was expected of it against
what came.

One self-contained HTML file with inline SVG: no script, nothing fetched.
"""

import html
from collections.abc import Sequence
from pathlib import Path

from paceline.pacing.trace import TraceRow, read_trace

WIDTH, LEFT, RIGHT = 960, 64, 12
PANEL, GAP = 170, 44
COLOURS = ("#9aa5b1", "#2f6fde", "#e07b39", "#2a9d6f", "#b04fc4", "#c9a227", "#d1495b", "#3aa7b8", "#7a6a53")
STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 32px auto; max-width: 1000px; color: #1b2733; }
h1 { font-size: 20px; } h2 { font-size: 16px; margin-top: 32px; }
table { border-collapse: collapse; } th, td { text-align: right; padding: 2px 14px 2px 0; } th:first-child, td:first-child { text-align: left; }
text { font: 11px system-ui, sans-serif; fill: #52606d; } .axis { stroke: #cbd2d9; }
.key { display: inline-block; width: 10px; height: 10px; margin-right: 6px; }
"""


def write_page(trace_path: Path, out: Path, title: str, step: int | None = None) -> int:
    """The rollout of one step of the run, by default the last; returns which."""
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
    rows = [row for row in rows if row.steps]
    names = sorted(
        {str(row.decision.strategy) for row in rows},
        key=lambda name: (name != "plain", name.split(":")[0], int(name.partition(":")[2] or 0)),
    )
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    tokens, seconds = sum(row.tokens for row in rows), sum(row.seconds for row in rows)
    head = f"{sum(row.steps for row in rows)} steps, {tokens} tokens, {seconds:.3g} s, {tokens / max(seconds, 1e-9):.0f} tokens/s"
    body = [
        f"<h1>{html.escape(title)}: rollout of step {step}</h1><p>{head}</p>",
        _chart(rows, colours),
        "<h2>By strategy</h2>",
        _table(rows, names, colours),
        "<p>Trials are short runs of a strategy that is not in use, to see what its drafter gains or how "
        "long it takes. "
        "Time is that of the steps; prefill between them counts to the step that follows it.</p>",
    ]
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    return f"{head}<body>{''.join(body)}</body></html>\n"


def _chart(rows: Sequence[TraceRow], colours: dict[str, str]) -> str:
    """Three panels over the decode steps: running requests, the strategy, expected and realised tokens per
    second.
    """
    total = sum(row.steps for row in rows)
    starts, at = [], 0
    for row in rows:
        starts.append(at)
        at += row.steps
    scale = (WIDTH - LEFT - RIGHT) / max(1, total)
    spans = [
        (LEFT + start * scale, LEFT + (start + row.steps) * scale)
        for start, row in zip(starts, rows, strict=True)
    ]
    tops = [24, 24 + PANEL + GAP, 24 + PANEL + GAP + 60 + GAP]
    height = tops[2] + PANEL + 30
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" aria-label="pacing over the rollout">'
    ]
    most = max(row.running for row in rows)
    parts.append(_frame(tops[0], PANEL, "running requests", most))
    parts.append(_line(spans, [row.running for row in rows], most, tops[0], PANEL, "#1b2733"))
    parts.append(f'<text x="{LEFT}" y="{tops[1] - 6}">strategy (faint: a trial)</text>')
    for (left, right), row in zip(spans, rows, strict=True):
        name, faint = str(row.decision.strategy), 0.45 if row.decision.reason == "trial" else 1.0
        tip = (
            f"{name} ({row.decision.reason}), {row.running:.0f} running, context {row.decision.context:.0f}, "
            f"{row.steps} steps, "
            f"{row.tokens} tokens in {1e3 * row.seconds:.1f} ms, {row.decision.expected:.0f} tokens/s "
            "expected"
        )
        parts.append(
            f'<rect x="{left:.2f}" y="{tops[1]}" width="{max(0.5, right - left):.2f}" height="60" fill="{colours[name]}" fill-opacity="{faint}">'
            f"<title>{html.escape(tip)}</title></rect>"
        )
    rates = [row.realised for row in rows]
    expected = [row.decision.expected for row in rows]
    highest = max([*sorted(rates)[: max(1, int(0.98 * len(rates)))], 1e-9])
    parts.append(_frame(tops[2], PANEL, "tokens/s: realised (dark), expected (orange)", highest))
    parts.append(_line(spans, rates, highest, tops[2], PANEL, "#1b2733"))
    known = [(span, value) for span, value in zip(spans, expected, strict=True) if value > 0]
    if known:
        parts.append(
            _line(
                [span for span, _ in known], [value for _, value in known], highest, tops[2], PANEL, "#e07b39"
            )
        )
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{height - 8}" text-anchor="end">decode step {total}</text></svg>'
    )
    return "".join(parts)


def _frame(top: float, height: float, label: str, most: float) -> str:
    return (
        f'<text x="{LEFT}" y="{top - 6}">{html.escape(label)}</text><text x="{LEFT - 6}" y="{top + 10}" text-anchor="end">{most:.4g}</text>'
        f'<text x="{LEFT - 6}" y="{top + height}" text-anchor="end">0</text>'
        f'<path class="axis" fill="none" d="M{LEFT} {top}V{top + height}H{WIDTH - RIGHT}"/>'
    )


def _line(
    spans: list[tuple[float, float]], values: list[float], most: float, top: float, height: float, colour: str
) -> str:
    points = []
    for (left, right), value in zip(spans, values, strict=True):
        y = top + height * (1 - min(value, most) / most)
        points += [f"{left:.2f},{y:.2f}", f"{right:.2f},{y:.2f}"]
    return f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{" ".join(points)}"/>'


def _table(rows: Sequence[TraceRow], names: list[str], colours: dict[str, str]) -> str:
    lines = [
        "<table><tr><th>strategy<th>steps<th>of these trials<th>share of "
        "time<th>tokens/row/step<th>tokens/s</tr>"
    ]
    seconds = sum(row.seconds for row in rows) or 1e-9
    for name in names:
        own = [row for row in rows if str(row.decision.strategy) == name]
        spent, tokens = sum(r.seconds for r in own), sum(r.tokens for r in own)
        trials = sum(r.steps for r in own if r.decision.reason == "trial")
        lines.append(
            f'<tr><td><span class="key" style="background:{colours[name]}"></span>{html.escape(name)}<td>{sum(r.steps for r in own)}<td>{trials}'
            f"<td>{100 * spent / seconds:.1f}%<td>{tokens / max(1, sum(r.rows for r in own)):.2f}<td>{tokens / max(spent, 1e-9):.0f}</tr>"
        )
    return "".join([*lines, "</table>"])
