"""A profile of the machine at hand: measured kernels, fitted curves, and what a data sheet must add."""

import dataclasses
import os
from dataclasses import dataclass
from statistics import median

from paceline.simulate.fit import fit_hardware
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
from paceline.simulate.points import FIT, Measurements
from paceline.simulate.predict import predict_kernel

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
    parts = {
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
