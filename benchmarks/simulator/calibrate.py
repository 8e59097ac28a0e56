"""Measures this machine's kernels and writes a hardware profile that `paceline simulate` reads.

    python -m benchmarks.simulator.calibrate machine.json

It takes about a minute on a GPU, and runs from the repository's root. Kernels are measured and curves fitted
to them (`fit.py`); links and learning come from a shipped profile of the same device, where there is one.
"""

import argparse
import dataclasses
import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.simulator.fit import fit_hardware
from benchmarks.simulator.measure import measure_kernels
from benchmarks.simulator.measure_grid import CPU, GPU
from benchmarks.simulator.points import (
    FIT,
    KernelPoint,
    Measurements,
    load_measurements,
    merged,
    write_measurements,
)
from benchmarks.simulator.predict import predict_kernel
from paceline.device import best_device
from paceline.simulate.hardware import (
    DataSheet,
    Hardware,
    Links,
    Origin,
    Source,
    Training,
    load_hardware,
    shipped_profiles,
)

CPU_ROW_TILE = 2  # a CPU multiplies no single row (kernels/row_tiles.py)
# What is assumed of a machine without a shipped profile.
UNKNOWN_LINKS = Links(1, 1e10, 5e-5, 1e9, 1e-3)
UNKNOWN_TRAINING = Training(0.5, 0.5, 0.0, 0.0)


@dataclass(frozen=True)
class FitReport:
    """The relative errors of one part's curve at the points that it was fitted to, or at those held out."""

    part: str
    use: str
    count: int
    median: float
    worst: float

    def __str__(self) -> str:
        errors = f"median {100 * self.median:5.1f}%, worst {100 * self.worst:5.1f}%"
        return f"{self.part:<12}{self.use:<9}{self.count:>4} points, {errors}"


def profile_from(name: str, points: Measurements, base: str | None = None) -> Hardware:
    """Fits a profile to points.

    `base` is a shipped profile of the same device, for what kernels cannot tell; by default the one that the
    device's name contains.
    """
    base = base or matching_profile(points.device)
    if base is None:
        return _profile_of_unknown(name, points)
    known = load_hardware(base)
    fitted = fit_hardware(name, points, known.data_sheet, known.links, known.training)
    if fitted.kernels.gemm_fp8 is None and known.kernels.gemm_fp8 is not None:
        kernels = dataclasses.replace(fitted.kernels, gemm_fp8=known.kernels.gemm_fp8)
        provenance = fitted.provenance | {"gemm_fp8": known.provenance["gemm_fp8"]}
        fitted = dataclasses.replace(fitted, kernels=kernels, provenance=provenance)
    return fitted


def _profile_of_unknown(name: str, points: Measurements) -> Hardware:
    on_cpu = points.device == "CPU"
    row_tile = CPU_ROW_TILE if on_cpu else 1
    hardware = fit_hardware(name, points, ceilings(points), UNKNOWN_LINKS, UNKNOWN_TRAINING, row_tile)
    note = "best rates seen among the points" + ("; float32 counted as if it had 16 bits" if on_cpu else "")
    provenance = hardware.provenance | {"data_sheet": Origin(Source.FITTED, note)}
    return dataclasses.replace(hardware, provenance=provenance)


def matching_profile(device: str) -> str | None:
    """Returns the shipped profile whose name the device's contains."""
    lowered = device.lower().replace(" ", "")
    names = sorted(shipped_profiles(), key=len, reverse=True)  # gb200 before b200
    return next((name for name in names if name in lowered), None)


def ceilings(points: Measurements) -> DataSheet:
    """Returns the highest bandwidth and rate that any product reached, in place of a data sheet."""
    sizes = [(p, sum(width * depth * count for width, depth, count in p.weights)) for p in points.gemms]
    bandwidth = max((size * 2.0 / p.seconds for p, size in sizes), default=0.0)
    flops = max((2.0 * p.rows * size / p.seconds for p, size in sizes), default=0.0)
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return DataSheet(memory, bandwidth, flops, 0.0)


def fit_report(hardware: Hardware, points: Measurements) -> list[FitReport]:
    """Returns how well the curves go through the points, those that were fitted before those held out."""
    products = [p for p in points.gemms if p.precision == "bf16" and p.kernel != "cublas"]
    parts: dict[str, Sequence[KernelPoint]] = {
        "products": products,
        "attention": points.attention,
        "rest": points.rest,
        "experts": points.experts,
    }
    reports = []
    for part, measured in parts.items():
        for use in sorted({p.use for p in measured}, key=lambda use: use != FIT):
            chosen = [p for p in measured if p.use == use]
            errors = [abs(predict_kernel(hardware.kernels, p) / p.seconds - 1) for p in chosen]
            reports.append(FitReport(part, use, len(errors), median(errors), max(errors)))
    return reports


def write_hardware(hardware: Hardware, path: Path) -> None:
    path.write_text(json.dumps(_rounded(dataclasses.asdict(hardware)), indent=2) + "\n")


def _rounded(tree: Any) -> Any:
    """Rounds to five digits: more would suggest more than was measured."""
    if isinstance(tree, dict):
        return {key: _rounded(value) for key, value in tree.items()}
    return float(f"{tree:.5g}") if isinstance(tree, float) else tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the profile to write")
    parser.add_argument("--points", action="append", type=Path, help="fit these points instead of measuring")
    parser.add_argument("--save-points", type=Path, help="also write the measured points here")
    parser.add_argument("--base", help="profile for what kernels cannot tell; default: by the device's name")
    parser.add_argument("--name", help="what the profile calls itself; default: the file's name")
    arguments = parser.parse_args()
    if arguments.points:
        measured = merged([load_measurements(path) for path in arguments.points])
    else:
        device = best_device()
        grid = GPU if device.type == "cuda" else CPU
        measured = measure_kernels(device, grid, print, datetime.date.today().isoformat())
    if arguments.save_points is not None:
        write_measurements(measured, arguments.save_points)
    hardware = profile_from(arguments.name or arguments.out.stem, measured, arguments.base)
    write_hardware(hardware, arguments.out)
    for report in fit_report(hardware, measured):
        print(report)
    print(f"written to {arguments.out}; try: paceline simulate hardware={arguments.out}")


if __name__ == "__main__":
    main()
