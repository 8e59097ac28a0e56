"""Line charts as SVG text, in place of a plotting library. The colours work on light and dark pages."""

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import numpy as np

COLOURS = ("#2a78d6", "#d1495b", "#2e9e6b", "#b7791f", "#7a5cc0", "#5b6770")
WIDTH = 800
HEIGHT = 320
# Margins; the legend stands in the right one.
LEFT = 58
RIGHT = 190
TOP = 34
BOTTOM = 44

Coordinate = Callable[[float], float]  # from a value to a place on the page


@dataclass(frozen=True)
class Line:
    """One series of a chart."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    dashed: bool = False
    points: bool = False  # markers instead of a line


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

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#6b7280">',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="600">{escape(title)}</text>',
    ]
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
    row = TOP + 8 + 18 * number
    return [*parts, f'<text x="{WIDTH - RIGHT + 10}" y="{row}" fill="{colour}">{escape(line.label)}</text>']


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
