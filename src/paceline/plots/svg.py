"""Draws a chart as SVG text, for pictures that must be seen without scripts: in the docs, on GitHub.

The same charts as on pages, without what needs a mouse. The colours work on light and dark backgrounds.
"""

from collections.abc import Callable, Iterator
from html import escape

import numpy as np

from paceline.plots.chart import Axis, Chart, Series

COLOURS = ("#2a78d6", "#d1495b", "#2e9e6b", "#b7791f", "#7a5cc0", "#5b6770", "#1aa3b8", "#c2569b", "#9aa3af")
GRID = 'stroke="#9ca3af" stroke-opacity="0.3"'
LEVEL = 'stroke="#6b7280" stroke-dasharray="2 3"'
WIDTH = 800
HEIGHT = 320
# Margins; the legend stands in the right one.
LEFT = 58
RIGHT = 190
TOP = 34
BOTTOM = 44

# A row of a bar chart, its space included, the bar within it, and room for its name.
ROW = 34
BAR = 22
NAMES = 170

# Space between the highest value and the edge, as a share of it.
HEADROOM = 0.06

Coordinate = Callable[[float], float]  # from a value to a place on the page


def to_svg(chart: Chart) -> str:
    """Returns the chart as SVG: lines over numbers, or a stack of bars for each name."""
    rows = max(len(chart.names), (len(chart.series) * 18 + 8) // ROW + 1)
    height = TOP + ROW * rows + BOTTOM if chart.names else HEIGHT
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12" fill="#6b7280">\n'
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="600">{escape(chart.title)}</text>'
    )
    return "\n".join([opening, *(_bars(chart, height) if chart.names else _lines(chart))]) + "</svg>"


def _bars(chart: Chart, height: int) -> Iterator[str]:
    """Yields horizontal bars, each a row of parts that share their colours and the legend."""
    parts = np.nan_to_num(np.array([series.y for series in chart.series], dtype=float))
    highest = float(parts.sum(axis=0).max()) * (1 + 2 * HEADROOM) or 1.0

    def px(x: float) -> float:
        return NAMES + x / highest * (WIDTH - NAMES - RIGHT)

    for tick in _ticks(0.0, highest):
        yield f'<line x1="{px(tick):.1f}" x2="{px(tick):.1f}" y1="{TOP}" y2="{height - BOTTOM}" {GRID}/>'
        yield _centred(f"{px(tick):.1f}", height - BOTTOM + 16, f"{tick:g}")
    for number, name in enumerate(chart.names):
        y = TOP + ROW * number + (ROW - BAR) // 2
        yield f'<text x="{NAMES - 8}" y="{y + BAR / 2 + 4}" text-anchor="end">{escape(name)}</text>'
        begin = 0.0
        for colour, part in enumerate(np.clip(parts[:, number], 0.0, None).tolist()):
            place = f'x="{px(begin):.1f}" y="{y}" width="{px(begin + part) - px(begin):.1f}"'
            yield f'<rect {place} height="{BAR}" fill="{COLOURS[colour % len(COLOURS)]}"/>'
            begin += part
    for number, series in enumerate(chart.series):
        yield _legend(series.label, number, COLOURS[number % len(COLOURS)])
    yield _centred((NAMES + WIDTH - RIGHT) / 2, height - 8, _axis_title(chart.y))


def _lines(chart: Chart) -> Iterator[str]:
    xs = np.asarray(chart.xs, dtype=float)
    ys = np.concatenate([np.array(series.y, dtype=float) for series in chart.series])
    x_low, x_high = float(xs.min()), float(xs.max())
    y_high = float(max(np.nanmax(ys), chart.level or 0.0)) * (1 + HEADROOM) or 1.0
    scale = np.log if chart.x.log else np.asarray

    def px(x: float) -> float:
        span = float(scale(x_high) - scale(x_low)) or 1.0
        return LEFT + float(scale(x) - scale(x_low)) / span * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - y / y_high * (HEIGHT - BOTTOM - TOP)

    def level(y: float, stroke: str) -> str:
        return f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}" {stroke}/>'

    for tick in _ticks(0.0, y_high):
        yield level(tick, GRID)
        yield f'<text x="{LEFT - 6}" y="{py(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
    for tick in _log_ticks(x_low, x_high) if chart.x.log else _ticks(x_low, x_high):
        yield _centred(f"{px(tick):.1f}", HEIGHT - BOTTOM + 16, f"{tick:g}")
    if chart.level is not None:
        yield level(chart.level, LEVEL)
    for number, series in enumerate(chart.series):
        yield from _curve(series, xs, number, px, py)
    yield _centred((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, _axis_title(chart.x))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield _centred(14, middle, _axis_title(chart.y), f' transform="rotate(-90 14 {middle})"')


def _curve(series: Series, xs: np.ndarray, number: int, px: Coordinate, py: Coordinate) -> Iterator[str]:
    """Yields a line or its markers, and its place in the legend."""
    colour = COLOURS[series.colour % len(COLOURS)]
    ys = np.array(series.y, dtype=float)
    known = np.isfinite(ys)
    places = [(f"{px(x):.1f}", f"{py(y):.1f}") for x, y in zip(xs[known], ys[known], strict=True)]
    if series.line:
        path = " ".join(f"{x},{y}" for x, y in places)
        dash = ' stroke-dasharray="6 4"' if series.dash else ""
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
    if series.points or not series.line:
        yield from (f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>' for x, y in places)
    yield _legend(series.label, number, colour)


def _axis_title(axis: Axis) -> str:
    return escape(f"{axis.label} ({axis.unit})" if axis.unit else axis.label)


def _centred(x: object, y: object, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="middle"{more}>{text}</text>'


def _legend(label: str, number: int, colour: str) -> str:
    return (
        f'<text x="{WIDTH - RIGHT + 10}" y="{TOP + 8 + 18 * number}" fill="{colour}">{escape(label)}</text>'
    )


def _ticks(low: float, high: float, count: int = 6) -> list[float]:
    span = high - low
    if span <= 0:
        return [low]
    raw = span / count
    power = 10.0 ** np.floor(np.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    first = np.ceil(low / step) * step
    return [float(f"{t:.10g}") for t in np.arange(first, high + step * 1e-9, step)]


def _log_ticks(low: float, high: float) -> list[float]:
    first = int(np.floor(np.log2(max(low, 1))))
    last = int(np.ceil(np.log2(max(high, 2))))
    ticks = [t for t in (float(2**i) for i in range(first, last + 1)) if low <= t <= high]
    return ticks[:: max(1, len(ticks) // 8)] or [low]
