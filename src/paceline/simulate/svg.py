"""Line charts as SVG text: two dozen lines instead of a plotting library. Colours work on light and dark
pages.
"""

from dataclasses import dataclass
from html import escape

import numpy as np

COLOURS = ("#2a78d6", "#d1495b", "#2e9e6b", "#b7791f", "#7a5cc0", "#5b6770")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 800, 320, 58, 44, 34, 190  # the legend stands in the right margin


@dataclass(frozen=True)
class Line:
    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    dashed: bool = False
    points: bool = False  # markers instead of a line


def line_chart(
    title: str, x_label: str, y_label: str, lines: list[Line], log_x: bool = False, level: float | None = None
) -> str:
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
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12" fill="#6b7280">',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="600">{escape(title)}</text>',
    ]
    for tick in _ticks(0.0, y_high):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(tick):.1f}" y2="{py(tick):.1f}" stroke="#9ca3af" stroke-opacity="0.3"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{py(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in _log_ticks(x_low, x_high) if log_x else _ticks(x_low, x_high):
        parts.append(
            f'<text x="{px(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:g}</text>'
        )
    if level is not None:
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(level):.1f}" y2="{py(level):.1f}" stroke="#6b7280" stroke-dasharray="2 3"/>'
        )
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        if line.points:
            parts += [
                f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3.5" fill="{colour}"/>'
                for x, y in zip(line.x, line.y, strict=True)
            ]
        else:
            path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in zip(line.x, line.y, strict=True))
            dash = ' stroke-dasharray="6 4"' if line.dashed else ""
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        row = TOP + 8 + 18 * number
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{row}" fill="{colour}">{escape(line.label)}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{escape(y_label)}</text></svg>'
    )
    return "\n".join(parts)


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
    power_of_two = [
        float(2**i)
        for i in range(int(np.floor(np.log2(max(low, 1)))), int(np.ceil(np.log2(max(high, 2)))) + 1)
    ]
    ticks = [t for t in power_of_two if low <= t <= high]
    return ticks[:: max(1, len(ticks) // 8)] or [low]
