"""Charts as SVG text, in place of a plotting library. The colours work on light and dark pages."""

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import numpy as np

COLOURS = ("#2a78d6", "#d1495b", "#2e9e6b", "#b7791f", "#7a5cc0", "#5b6770", "#1aa3b8", "#c2569b", "#9aa3af")
WIDTH = 800
HEIGHT = 320
# Margins; the legend stands in the right one.
LEFT = 58
RIGHT = 190
TOP = 34
BOTTOM = 44

# A row of a bar chart, its space included, and the bar within it.
ROW = 34
BAR = 22
# Room for the names of bars.
NAMES = 130

Coordinate = Callable[[float], float]  # from a value to a place on the page


@dataclass(frozen=True)
class Line:
    """One series of a chart."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    dashed: bool = False
    points: bool = False  # markers instead of a line


@dataclass(frozen=True)
class Bar:
    """One bar of a stacked chart: its name, a length for each part, and a word behind it."""

    name: str
    parts: tuple[float, ...]
    remark: str = ""


def stacked_bars(title: str, x_label: str, part_names: list[str], bars: list[Bar]) -> str:
    """Returns horizontal bars, each a row of parts that share their colours and the legend."""
    height = TOP + ROW * max(len(bars), (len(part_names) * 18 + 8) // ROW + 1) + BOTTOM
    highest = max(sum(bar.parts) for bar in bars) * 1.12 or 1.0

    def px(x: float) -> float:
        return NAMES + x / highest * (WIDTH - NAMES - RIGHT)

    parts = [_opening(height, title)]
    for tick in _ticks(0.0, highest):
        parts.append(
            f'<line x1="{px(tick):.1f}" x2="{px(tick):.1f}" y1="{TOP}" y2="{height - BOTTOM}" '
            'stroke="#9ca3af" stroke-opacity="0.3"/>'
        )
        parts.append(_centred(f"{px(tick):.1f}", height - BOTTOM + 16, f"{tick:g}"))
    for number, bar in enumerate(bars):
        parts += _stack(bar, TOP + ROW * number + (ROW - BAR) // 2, px)
    parts += [_legend(name, number) for number, name in enumerate(part_names)]
    parts.append(_centred((NAMES + WIDTH - RIGHT) / 2, height - 8, escape(x_label)) + "</svg>")
    return "\n".join(parts)


def _stack(bar: Bar, y: int, px: Coordinate) -> list[str]:
    """Returns a bar's name, its parts side by side, and its remark behind them."""
    middle = y + BAR / 2 + 4
    drawn = [f'<text x="{NAMES - 8}" y="{middle}" text-anchor="end">{escape(bar.name)}</text>']
    begin = 0.0
    for number, part in enumerate(bar.parts):
        width = px(begin + max(0.0, part)) - px(begin)
        colour = COLOURS[number % len(COLOURS)]
        drawn.append(
            f'<rect x="{px(begin):.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'
        )
        begin += max(0.0, part)
    return [*drawn, f'<text x="{px(begin) + 6:.1f}" y="{middle}">{escape(bar.remark)}</text>']


def line_chart(
    title: str, x_label: str, y_label: str, lines: list[Line], log_x: bool = False, level: float | None = None
) -> str:
    """Returns a chart of the lines, with a dotted line at `level`."""
    xs = np.concatenate([np.asarray(line.x, dtype=float) for line in lines])
    ys = np.concatenate([np.asarray(line.y, dtype=float) for line in lines])
    x_low, x_high = float(xs.min()), float(xs.max())
    y_high = float(max(ys.max(), level or 0.0)) * 1.06 or 1.0
    scale = np.log if log_x else np.asarray

    def px(x: float) -> float:
        span = float(scale(x_high) - scale(x_low)) or 1.0
        return LEFT + float(scale(x) - scale(x_low)) / span * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - y / y_high * (HEIGHT - BOTTOM - TOP)

    parts = [_opening(HEIGHT, title)]
    for tick in _ticks(0.0, y_high):
        parts.append(_level(py(tick), 'stroke="#9ca3af" stroke-opacity="0.3"'))
        parts.append(f'<text x="{LEFT - 6}" y="{py(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in _log_ticks(x_low, x_high) if log_x else _ticks(x_low, x_high):
        parts.append(_centred(f"{px(tick):.1f}", HEIGHT - BOTTOM + 16, f"{tick:g}"))
    if level is not None:
        parts.append(_level(py(level), 'stroke="#6b7280" stroke-dasharray="2 3"'))
    for number, line in enumerate(lines):
        parts += _series(line, number, px, py)
    parts.append(_centred((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, escape(x_label)))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f' transform="rotate(-90 14 {middle})"'
    parts.append(_centred(14, middle, escape(y_label), turned) + "</svg>")
    return "\n".join(parts)


def _opening(height: int, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12" fill="#6b7280">\n'
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="600">{escape(title)}</text>'
    )


def _level(y: float, stroke: str) -> str:
    return f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" {stroke}/>'


def _centred(x: object, y: object, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="middle"{more}>{text}</text>'


def _series(line: Line, number: int, px: Coordinate, py: Coordinate) -> list[str]:
    """Returns a line or its markers, and its place in the legend."""
    colour = COLOURS[number % len(COLOURS)]
    places = [(f"{px(x):.1f}", f"{py(y):.1f}") for x, y in zip(line.x, line.y, strict=True)]
    if line.points:
        parts = [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>' for x, y in places]
    else:
        path = " ".join(f"{x},{y}" for x, y in places)
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
    return [*parts, _legend(line.label, number)]


def _legend(label: str, number: int) -> str:
    row = TOP + 8 + 18 * number
    colour = COLOURS[number % len(COLOURS)]
    return f'<text x="{WIDTH - RIGHT + 10}" y="{row}" fill="{colour}">{escape(label)}</text>'


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
