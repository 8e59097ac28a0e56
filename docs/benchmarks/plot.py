"""Draws `headline.svg` from the tables of this folder, so that the picture cannot say what the tables do not.

    python docs/benchmarks/plot.py

Left: speculation.md, decoding with a trained EAGLE-3 head. Right: rollout.md and pacing.md, seconds of one
long-tailed rollout, two sessions. Greys and colours are chosen to be readable on light and on dark pages.
"""

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
HIGHEST_RATIO = 2.0
BATCHES = (1, 4, 16, 64)
DRAFT_LENGTHS = ((1, GREEN), (3, BLUE), (7, RED))
BAR_HEIGHT = 24


def table(page: str, first_header: str, number: int = 0) -> list[list[str]]:
    """Returns the rows of the page's nth table whose header begins with this cell."""
    found = []
    lines = (FOLDER / page).read_text(encoding="utf-8").splitlines()
    for position, line in enumerate(lines):
        if (
            line.startswith("|")
            and _cells(line)[0] == first_header
            and lines[position + 1].startswith("|---")
        ):
            rows = []
            for row in lines[position + 2 :]:
                if not row.startswith("|"):
                    break
                rows.append(_cells(row))
            found.append(rows)
    return found[number]


def ratios_by_batch() -> dict[int, list[float]]:
    """Returns, by draft length, the speed-up over plain decoding at each of BATCHES."""
    rows = [row for row in table("speculation.md", "batch", 1) if int(row[0]) in BATCHES]
    by_point = {(int(row[0]), int(row[1])): _number(row[6]) for row in rows}
    return {k: [by_point[batch, k] for batch in BATCHES] for k, _ in DRAFT_LENGTHS}


def rollout_seconds() -> list[tuple[str, str, float, str]]:
    """Returns the bars: what they belong to, their label, seconds, colour."""
    plain = {row[0]: _number(row[1]) for row in table("rollout.md", "")}
    paced = {row[0]: _number(row[1]) for row in table("pacing.md", "strategy")}
    peer = plain["vLLM, same session as the first line"]
    without = "no speculation"
    synthetic = "synthetic drafter, right 0.8 to 0.7 by depth"
    return [
        (without, "vLLM 0.26.0", peer, GREY),
        (without, "Paceline, plain", plain["Paceline"], BLUE),
        (synthetic, "Paceline, plain", paced["plain"], GREY),
        (synthetic, "3 tokens, always", paced["k = 3"], GREEN),
        (synthetic, "paced", paced["pacer, second rollout"], BLUE),
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
    for ratio in (0.0, 0.5, 1.0, 1.5, 2.0):
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
    for k, colour in DRAFT_LENGTHS:
        points = [(x(batch), y(ratio)) for batch, ratio in zip(BATCHES, ratios[k], strict=True)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{colour}"/>' for px, py in points]
    ends = {k: y(ratios[k][-1]) + 4 for k, _ in DRAFT_LENGTHS}
    ends[3] -= 9  # 1 and 3 end at the same point
    ends[1] += 9
    for k, colour in DRAFT_LENGTHS:
        label = f"{k} token{'s' if k > 1 else ''}: {ratios[k][-1]:.2f}x"
        parts.append(_text(right + 12, ends[k], label, colour=colour))
    return parts


def _bar_panel() -> list[str]:
    left, top, right, bottom = BARS
    bars = rollout_seconds()
    longest = max(seconds for _, _, seconds, _ in bars)
    start = left - 130
    parts = [
        _text(start, 20, "Long-tailed rollout, 8B shape, 256 requests", size=15, weight=600),
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
        place = f'x="{left}" y="{vertical}" width="{width:.1f}" height="{BAR_HEIGHT}"'
        parts.append(f'<rect {place} rx="3" fill="{colour}"/>')
        inside = f"{seconds:.2f} s{ratio}"
        parts.append(_text(left + 8, middle, inside, colour="#ffffff", weight=600))
        vertical += BAR_HEIGHT + 6
    parts.append(_text(start, bottom + 22, "one NVIDIA H200, bf16, 2026-11-15"))
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
