"""Compares the runs of `modes.sh`: a table, and accuracy against training seconds and against samples.

    python benchmarks/modes_table.py RUNS OUT

Seconds are those of training steps (`time/step`), without evaluations. Lines of the plots are means over the
seeds that reached an evaluation; the table has [lowest, highest] over seeds.
"""

import json
import sys
from pathlib import Path
from statistics import mean

import numpy as np

from paceline.plots.align import aligned
from paceline.plots.chart import Axis, Chart, Series
from paceline.plots.svg import to_svg

COLUMNS = (
    "mode",
    "runs",
    "accuracy before",
    "accuracy after",
    "s / step",
    "samples",
    "lag",
    "crossed",
    "bias",
)


def read_records(run: Path) -> list[dict]:
    """Returns a run's records; a line that a crash cut off is left out."""
    records = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def course(records: list[dict]) -> list[tuple[float, float, float]]:
    """Returns (training seconds, samples learned from, accuracy) at each evaluation."""
    seconds = samples = 0.0
    points = []
    for record in records:
        if record["kind"] == "train":
            seconds += record["time/step"]
            samples += record["rollout/samples"]
        else:
            points.append((seconds, samples, record["eval/accuracy"]))
    return points


def spread(values: list[float], form: str) -> str:
    """Returns the mean, with [lowest, highest] where there are several."""
    if len(values) == 1:
        return format(values[0], form)
    return f"{mean(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def row(mode: str, runs: list[list[dict]]) -> list[str]:
    trained = [[r for r in records if r["kind"] == "train"] for records in runs]
    courses = [course(records) for records in runs]

    def means(key: str) -> list[float]:
        return [mean(r.get(key, 0.0) for r in own) for own in trained]

    return [
        mode,
        str(len(runs)),
        spread([100 * own[0][2] for own in courses], ".1f"),
        spread([100 * own[-1][2] for own in courses], ".1f"),
        spread(means("time/step"), ".2f"),
        f"{courses[0][-1][1]:.0f}",
        spread(means("rollout/lag_mean"), ".2f"),
        spread([100 * value for value in means("rollout/crossed_updates")], ".0f"),
        spread(means("rollout/length_bias"), ".1f"),
    ]


def mean_curve(runs: list[list[dict]], axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns seconds (axis 0) or samples (axis 1), and accuracy in percent, as means over runs."""
    columns = list(zip(*(course(records) for records in runs), strict=False))
    x = np.array([mean(point[axis] for point in column) for column in columns], dtype=float)
    return x, np.array([100 * mean(point[2] for point in column) for column in columns])


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    modes: dict[str, list[list[dict]]] = {}
    for run in sorted(folder.iterdir()):
        records = read_records(run)
        if len(course(records)) > 1:
            modes.setdefault(run.name.rpartition("-seed")[0], []).append(records)
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for mode, runs in modes.items():
        print("| " + " | ".join(row(mode, runs)) + " |")
    for axis, label in enumerate(("training seconds", "samples learned from")):
        xs, curves = aligned([mean_curve(runs, axis) for runs in modes.values()])
        series = [Series(mode, y, colour=i) for i, (mode, y) in enumerate(zip(modes, curves, strict=True))]
        chart = Chart("modes", "Rollout modes", Axis(label), Axis("held-out accuracy", "%"), xs, series)
        (out / f"modes-{'seconds' if axis == 0 else 'samples'}.svg").write_text(to_svg(chart))


if __name__ == "__main__":
    main()
