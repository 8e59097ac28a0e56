"""Draws `headline.svg` from the tables of this folder, so that the picture cannot say what the tables do not.

    python docs/benchmarks/plot.py

Left: speculation.md, decoding with a trained EAGLE-3 head. Right: rollout.md and pacing.md, seconds of two
long-tailed rollouts. Greys and colours are chosen to be readable on light and on dark pages.
"""

import itertools
import math
import re
from pathlib import Path

FOLDER = Path(__file__).parent
BLUE = "#2a78d6"
RED = "#d1495b"
GREEN = "#2e9e6b"
GREY = "#7b8494"
WIDTH = 960
HEIGHT = 330

# The plotting areas, in the units of the drawing: left, top, right, bottom.
LINES = (56, 62, 360, 270)
BARS = (640, 62, 900, 290)
HIGHEST_RATIO = 2.5
BATCHES = (1, 4, 16, 64)
# Proposals by the names of their columns, and how the picture calls them.
PROPOSALS = (
    ("eagle:3", "chain of 3", GREEN),
    ("tree7", "tree of 7", RED),
    ("tree15", "tree of 15", BLUE),
)
BAR_HEIGHT = 24
# Of a bar that its label fits into.
LABEL_WIDTH = 130


def table(page: str, *headers: str) -> list[dict[str, str]]:
    """Returns the rows of the page's first table with these headers, by header."""
    lines = (FOLDER / page).read_text(encoding="utf-8").splitlines()
    for position, line in enumerate(lines):
        if not line.startswith("|") or not lines[position + 1].startswith("|---"):
            continue
        names = _cells(line)
        if not set(headers) <= set(names):
            continue
        rows = itertools.takewhile(lambda row: row.startswith("|"), lines[position + 2 :])
        return [dict(zip(names, _cells(row), strict=True)) for row in rows]
    raise ValueError(f"{page} has no table with the headers {', '.join(headers)}")


def ratios_by_batch() -> dict[str, list[float]]:
    """Returns, by what is proposed, the speed-up over plain decoding at each of BATCHES."""
    headers = {name: f"`{name}`" for name, _, _ in PROPOSALS}
    rows = {int(row["batch"]): row for row in table("speculation.md", "wanted", *headers.values())}
    return {
        name: [_number(rows[batch][header].rsplit(",", 1)[1]) for batch in BATCHES]
        for name, header in headers.items()
    }


def rollout_seconds() -> list[tuple[str, str, float, str]]:
    """Returns the bars: what they belong to, their label, seconds, colour."""
    plain = {row[""]: _number(row["seconds"]) for row in table("rollout.md", "", "seconds")}
    paced = table("pacing.md", "seconds", "accept length", "captures s")
    real = {row["strategy"]: _number(row["seconds"]) for row in paced}
    without = "random weights, no speculation"
    with_head = "Countdown, a trained EAGLE-3 head, trees"
    return [
        (without, "vLLM 0.26.0", plain["vLLM, same session as the first line"], GREY),
        (without, "Paceline, plain", plain["Paceline"], BLUE),
        (with_head, "Paceline, plain", real["plain"], GREY),
        (with_head, "3 nodes, always", real["eagle, trees of 3"], GREEN),
        (with_head, "paced", real["pacer, second rollout"], BLUE),
    ]


def draw() -> str:
    """Returns the whole picture."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="13" fill="{GREY}">'
    )
    return "\n".join([head, *_line_panel(), *_bar_panel(), "</svg>"]) + "\n"


def _line_panel() -> list[str]:
    left, top, right, bottom = LINES

    def x(batch: float) -> float:
        return left + (right - left) * math.log(batch, BATCHES[-1])

    def y(ratio: float) -> float:
        return bottom - (bottom - top) * ratio / HIGHEST_RATIO

    parts = [
        _text(left, 20, "Decoding with a trained EAGLE-3 head, 8B cost", size=15, weight=600),
        _text(left, 40, "tokens/s over plain decoding, the same tokens"),
    ]
    for ratio in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5):
        strength = 1.0 if ratio == 1.0 else 0.3
        parts.append(
            f'<line x1="{left}" x2="{right}" y1="{y(ratio):.1f}" y2="{y(ratio):.1f}" '
            f'stroke="{GREY}" stroke-opacity="{strength}"/>'
        )
        parts.append(_text(left - 8, y(ratio) + 4, f"{ratio:.1f}x", anchor="end"))
    for batch in BATCHES:
        parts.append(_text(x(batch), bottom + 20, str(batch), anchor="middle"))
    parts.append(_text((left + right) / 2, bottom + 42, "requests running (batch)", anchor="middle"))
    ratios = ratios_by_batch()
    for name, label, colour in PROPOSALS:
        points = [(x(batch), y(ratio)) for batch, ratio in zip(BATCHES, ratios[name], strict=True)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{colour}"/>' for px, py in points]
        end = points[-1][1] + 4
        parts.append(_text(right + 12, end, f"{label}: {ratios[name][-1]:.2f}x", colour=colour))
    return parts


def _bar_panel() -> list[str]:
    left, top, right, bottom = BARS
    bars = rollout_seconds()
    longest = max(seconds for _, _, seconds, _ in bars)
    start = left - 130
    parts = [
        _text(start, 20, "Long-tailed rollout, 8B cost, 256 requests", size=15, weight=600),
        _text(start, 40, "seconds; ratios within one session"),
    ]
    vertical = top
    belongs_to = ""
    first = 0.0
    for group, label, seconds, colour in bars:
        if group != belongs_to:
            vertical += 8 if belongs_to else 0
            parts.append(_text(start, vertical + 12, group, weight=600))
            vertical += 20
            belongs_to, first = group, seconds
        width = (right - left) * seconds / longest
        ratio = "" if seconds == first else f" ({first / seconds:.2f}x)"
        middle = vertical + BAR_HEIGHT / 2 + 5
        parts.append(_text(left - 8, middle, label, anchor="end"))
        box = f'x="{left}" y="{vertical}" width="{width:.1f}" height="{BAR_HEIGHT}"'
        parts.append(f'<rect {box} rx="3" fill="{colour}"/>')
        inside = f"{seconds:.2f} s{ratio}"
        fits = width >= LABEL_WIDTH
        place, colour = (left + 8, "#ffffff") if fits else (left + width + 8, GREY)
        parts.append(_text(place, middle, inside, colour=colour, weight=600))
        vertical += BAR_HEIGHT + 6
    parts.append(_text(start, bottom + 22, "one NVIDIA H200, bf16, 2026-11-15 and 2026-11-17"))
    return parts


def _text(
    x: float,
    y: float,
    text: str,
    size: int = 13,
    weight: int = 400,
    anchor: str = "start",
    colour: str = GREY,
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{text}</text>'


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _number(cell: str) -> float:
    found = re.search(r"\d+(?:\.\d+)?", cell)
    assert found is not None, f"no number in the cell {cell!r}"
    return float(found.group())


if __name__ == "__main__":
    (FOLDER / "headline.svg").write_text(draw(), encoding="utf-8")
