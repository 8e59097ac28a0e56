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
from paceline.simulate.predict import predict_attention, predict_experts, predict_gemm, predict_rest

CPU_ROW_TILE = 32  # kernels/linear.py pads to this


@dataclass(frozen=True)
class FitReport:
    """How well the curves go through the points, seen and held out, by part: (count, median, worst) relative
    error.
    """

    part: str
    use: str
    count: int
    median: float
    worst: float

    def __str__(self) -> str:
        return f"{self.part:<12}{self.use:<9}{self.count:>4} points, median {100 * self.median:5.1f}%, worst {100 * self.worst:5.1f}%"


def profile_from(name: str, points: Measurements, base: str | None = None) -> Hardware:
    """`base`: a shipped profile of the same device, for what kernels cannot tell; found by the device's
    name.
    """
    base = base or matching_profile(points.device)
    if base is not None:
        known = load_hardware(base)
        fitted = fit_hardware(name, points, known.data_sheet, known.links, known.training)
        if fitted.kernels.gemm_fp8 is None and known.kernels.gemm_fp8 is not None:
            kernels = dataclasses.replace(fitted.kernels, gemm_fp8=known.kernels.gemm_fp8)
            provenance = fitted.provenance | {"gemm_fp8": known.provenance["gemm_fp8"]}
            fitted = dataclasses.replace(fitted, kernels=kernels, provenance=provenance)
        return fitted
    on_cpu = points.device == "CPU"
    sheet = ceilings(points)
    links = Links(1, 1e10, 5e-5, 1e9, 1e-3)
    hardware = fit_hardware(
        name, points, sheet, links, Training(0.5, 0.5, 0.0, 0.0), CPU_ROW_TILE if on_cpu else 1
    )
    note = "best rates seen among the points" + ("; float32 counted as if it had 16 bits" if on_cpu else "")
    return dataclasses.replace(
        hardware, provenance=hardware.provenance | {"data_sheet": Origin(Source.FITTED, note)}
    )


def matching_profile(device: str) -> str | None:
    lowered = device.lower().replace(" ", "")
    names = sorted(shipped_profiles(), key=len, reverse=True)  # gb200 before b200
    return next((name for name in names if name in lowered), None)


def ceilings(points: Measurements) -> DataSheet:
    """Where there is no data sheet: the highest bandwidth and rate that any product reached, and the
    machine's memory.
    """
    bandwidth = max(sum(w * d * c for w, d, c in p.weights) * 2.0 / p.seconds for p in points.gemms)
    flops = max(sum(2.0 * p.rows * w * d * c for w, d, c in p.weights) / p.seconds for p in points.gemms)
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return DataSheet(memory, bandwidth, flops, 0.0)


def fit_report(hardware: Hardware, points: Measurements) -> list[FitReport]:
    kernels = hardware.kernels
    parts = {
        "products": [
            (p.use, predict_gemm(kernels, p) / p.seconds)
            for p in points.gemms
            if p.precision == "bf16" and p.kernel != "cublas"
        ],
        "attention": [(p.use, predict_attention(kernels, p) / p.seconds) for p in points.attention],
        "rest": [(p.use, predict_rest(kernels, p) / p.seconds) for p in points.rest],
        "experts": [(p.use, predict_experts(kernels, p) / p.seconds) for p in points.experts],
    }
    reports = []
    for part, ratios in parts.items():
        for use in sorted({use for use, _ in ratios}, key=lambda u: u != FIT):
            errors = [abs(ratio - 1) for u, ratio in ratios if u == use]
            reports.append(FitReport(part, use, len(errors), median(errors), max(errors)))
    return reports
