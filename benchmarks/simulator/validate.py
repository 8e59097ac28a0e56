"""Compares predictions with measurements, ours and published ones, and writes the notes about them.

    python -m benchmarks.simulator.validate --write benchmarks/notes

Without `--write` it prints a summary only. It runs from the repository's root.
"""

import argparse
from pathlib import Path

from benchmarks.simulator import h200, nvidia, projection, tlt
from benchmarks.simulator.check import FIT, Check, Section, predictions, summary, worst_error
from benchmarks.simulator.points import Measurements
from paceline.simulate.hardware import Hardware, load_hardware, shipped_profiles
from paceline.simulate.report import provenance_lines

PAGE = "simulator-validation.md"
INTRODUCTION = Path(__file__).parent / "introduction.md"


def sections(hardware: Hardware, points: Measurements) -> list[Section]:
    return [
        h200.step_section(hardware, points, "paceline"),
        h200.step_section(hardware, points, "vllm"),
        h200.kernel_section(hardware, points),
        nvidia.steps(),
        nvidia.k_sweep(),
        tlt.batch_table(),
        tlt.nodes_table(),
        projection.projection(),
    ]


def render(all_sections: list[Section]) -> str:
    parts = [
        INTRODUCTION.read_text(),
        "## In short",
        "",
        "| what | figures | predictions: median and worst error |",
        "|---|---|---|",
    ]
    for section in all_sections:
        seen = [c for c in section.checks if c.kind == FIT]
        unseen = predictions(section.checks)
        fits = f"{len(seen)} fitted (worst {100 * worst_error(seen):.1f}%)" if seen else "none fitted"
        parts.append(f"| {section.title} | {fits} | {summary(unseen) if unseen else 'none'} |")
    parts += ["", *_held_out_line(all_sections), ""]
    for section in all_sections:
        parts += [f"## {section.title}", "", f"Source: {section.source}.", "", *table(section.checks), ""]
        parts += [f"![{name}]({name})" for name in section.charts]
        parts += ["", *(f"- {remark}" for remark in section.remarks), ""] if section.remarks else []
    parts += ["## Profiles", ""]
    for name in shipped_profiles():
        parts += [f"**{name}**", "", "```", *provenance_lines(load_hardware(name).provenance), "```", ""]
    return "\n".join(parts).rstrip() + "\n"


def _held_out_line(all_sections: list[Section]) -> list[str]:
    own = predictions(all_sections[0].checks)
    groups = {
        "decode": [c for c in own if ": decode" in c.what],
        "verify": [c for c in own if "verify" in c.what],
        "rollout": [c for c in own if "rollout" in c.what],
    }
    lines = [f"- held-out {name} on the H200: {summary(checks)}" for name, checks in groups.items() if checks]
    return [
        "The aim for our own decode, verify and rollout times was 10% (median) and 20% (worst):",
        "",
        *lines,
    ]


def table(checks: tuple[Check, ...]) -> list[str]:
    lines = ["| | measured | predicted | error | |", "|---|---|---|---|---|"]
    for c in checks:
        figures = f"{_number(c.measured)} {c.unit} | {_number(c.predicted)} {c.unit}"
        lines.append(f"| {c.what} | {figures} | {100 * c.error:+.1f}% | {c.kind} |")
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def write(folder: Path, made: list[Section]) -> None:
    (folder / PAGE).write_text(render(made))
    for section in made:
        for name, svg in section.charts.items():
            (folder / name).write_text(svg + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h200", help="the profile whose predictions are checked")
    parser.add_argument("--points", action="append", type=Path, help="further measured points")
    parser.add_argument("--write", type=Path, help="folder for the page and its plots")
    arguments = parser.parse_args()
    profile = load_hardware(arguments.hardware)
    points = h200.our_measurements(arguments.points or ())
    made = sections(profile, points)
    if arguments.write is not None:
        write(arguments.write, made)
    for section in made:
        unseen = predictions(section.checks)
        print(f"{section.title}: {summary(unseen) if unseen else 'fits only'}")


if __name__ == "__main__":
    main()
