"""From measured points to a hardware profile. Only points marked `fit` are looked at.

Each part of the profile is fitted to points of its own, then what is left of a whole step (`other`) to one or
two steps; so a part that was never measured alone is visible as such in the provenance.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from benchmarks.simulator.least_squares import fit_positive
from benchmarks.simulator.points import (
    FIT,
    AttentionPoint,
    ExpertPoint,
    GemmPoint,
    KernelPoint,
    Measurements,
    RestPoint,
    StepPoint,
)
from benchmarks.simulator.predict import (
    predict_attention,
    predict_experts,
    predict_gemm,
    predict_rest,
    predict_step,
)
from paceline.simulate.hardware import (
    AttentionCurve,
    DataSheet,
    ExpertCurve,
    GemmCurve,
    Hardware,
    Kernels,
    Links,
    Origin,
    OtherCurve,
    Source,
    Training,
)

CUBLAS_ROWS = 65  # the native engine's own kernel below, cuBLAS from here on (kernels/linear.py)
VERIFY_QUERIES = 4  # attention to more queries than this shows an arithmetic rate
FEW_TOKENS, MANY_TOKENS = 1, 64  # of an expert: below, its launch shows; from here on, its arithmetic
MANY_POINTS = 8  # with fewer, a row's cost cannot be separated from its keys'

Fitted = TypeVar("Fitted")
Point = TypeVar("Point", bound=KernelPoint | StepPoint)


def fit_hardware(
    name: str,
    measurements: Measurements,
    sheet: DataSheet,
    links: Links,
    training: Training,
    row_tile: int = 1,
) -> Hardware:
    """Fits every part that has points; the rest is borrowed, as the provenance records.

    Products and decode attention cannot be borrowed.
    """
    decoding = [p for p in _seen(measurements.attention) if not p.new]
    for part, points in (
        ("gemms in bf16", _gemms(measurements, "bf16")),
        ("attention of decoding", decoding),
    ):
        if not points:
            raise ValueError(
                f"there is no point of {part} to fit; "
                "`python -m benchmarks.simulator.calibrate OUT` measures a machine's"
            )
    start = GemmCurve(4e-6, sheet.bandwidth, sheet.bf16_flops, 30.0, 2.5, row_tile)
    gemm = fit_gemm(_gemms(measurements, "bf16"), start)
    fp8_points = _gemms(measurements, "fp8")
    attention = _seen(measurements.attention)
    rest = _seen(measurements.rest)
    experts = _seen(measurements.experts)
    other = OtherCurve(5e-6, gemm.bandwidth, 1e12)
    kernels = Kernels(
        gemm,
        fit_fp8(fp8_points, gemm, sheet) if fp8_points else None,
        fit_attention(attention, AttentionCurve(8e-6, sheet.bandwidth, 1e-10, 1e14, 3e14)),
        fit_rest(rest, other) if rest else other,
        fit_experts(experts, gemm)
        if experts
        else ExpertCurve(gemm.launch_seconds, gemm.bandwidth, gemm.flops),
    )
    hardware = Hardware(name, sheet, kernels, links, training, {})
    steps = [
        p
        for p in _seen(measurements.steps)
        if p.engine == "paceline" and p.layer == "engine" and not p.prefill
    ]
    if steps:
        hardware = fit_other_on_steps(steps, hardware, sampler_known=bool(rest))
    provenance = _provenance(measurements, bool(fp8_points), bool(experts), len(steps))
    return dataclasses.replace(hardware, provenance=provenance)


def _provenance(measurements: Measurements, fp8: bool, experts: bool, steps: int) -> dict[str, Origin]:
    where = f"{measurements.device}, {measurements.software}, {measurements.date}"
    fitted = Origin(Source.MEASURED, f"curve through measured points: {where}")
    on_steps = Origin(Source.FITTED, f"what {steps} whole decode steps leave over: {where}")
    borrowed = Origin(Source.ASSUMED, "the dense product's launch, bandwidth and rate; never timed")
    links = "one device was measured; data-sheet bandwidth x 0.7, latencies of published collectives"
    return {
        "data_sheet": Origin(Source.ASSUMED, "the vendor's figures"),
        "gemm_bf16": fitted,
        "gemm_fp8": fitted if fp8 else Origin(Source.ASSUMED, "none"),
        "attention": fitted,
        "other": on_steps if steps else fitted,
        "experts": fitted if experts else borrowed,
        "links": Origin(Source.ASSUMED, links),
        "training": Origin(Source.ASSUMED, "share of the data sheet's rate, set by hand"),
    }


def _seen(points: Sequence[Point]) -> list[Point]:
    return [p for p in points if p.use == FIT]


def _gemms(measurements: Measurements, precision: str) -> list[GemmPoint]:
    return [
        p
        for p in _seen(measurements.gemms)
        if p.precision == precision and (p.kernel != "cublas" or p.rows >= CUBLAS_ROWS)
    ]


def _fit(
    points: Sequence[Point],
    make: Callable[[np.ndarray], Fitted],
    predict: Callable[[Fitted, Point], float],
    start: Sequence[float],
) -> Fitted:
    """Returns `make` of the positive parameters with which `predict` comes closest to the points."""

    def seconds(x: np.ndarray) -> np.ndarray:
        made = make(x)
        return np.array([predict(made, p) for p in points])

    return make(fit_positive(seconds, np.array([p.seconds for p in points]), np.array(start)))


def fit_gemm(points: list[GemmPoint], start: GemmCurve) -> GemmCurve:
    """Fits everything but the row tile."""

    def make(x: np.ndarray) -> GemmCurve:
        return GemmCurve(x[0], x[1], x[2], x[3], 1 + x[4], start.row_tile)

    first = [start.launch_seconds, start.bandwidth, start.flops, start.half_rows, start.sharpness - 1]
    return _fit(points, make, predict_gemm, first)


def fit_fp8(points: list[GemmPoint], bf16: GemmCurve, sheet: DataSheet) -> GemmCurve:
    """Fits launch and rate; bandwidth and knee are the 16-bit product's, because the memory is the same."""

    def make(x: np.ndarray) -> GemmCurve:
        return dataclasses.replace(bf16, launch_seconds=x[0], flops=x[1])

    return _fit(points, make, predict_gemm, [1e-5, sheet.fp8_flops])


def fit_attention(points: list[AttentionPoint], start: AttentionCurve) -> AttentionCurve:
    """Fits decode and prefill attention.

    Prefill gives an arithmetic rate; decoding, which hardly shows one, borrows it unless deep verification
    was measured.
    """
    decode = [p for p in points if not p.new]
    prefill = [p for p in points if p.new]
    verify = any(p.queries > VERIFY_QUERIES for p in decode)
    many = len(decode) >= MANY_POINTS
    start = _fit_prefill(prefill, start, verify)

    def make(x: np.ndarray) -> AttentionCurve:
        return dataclasses.replace(
            start,
            launch_seconds=x[0],
            bandwidth=x[1],
            serial_seconds_per_key=x[2],
            flops=x[3] if verify else start.flops,
            row_seconds=x[-1] if many else 0.0,
        )

    first = [start.launch_seconds, start.bandwidth, start.serial_seconds_per_key]
    first += [start.flops] * verify + [start.launch_seconds / 100] * many
    decoding = _fit(decode, make, predict_attention, first)
    return _fit_prefill(prefill, decoding, verify)  # now with the launch that decoding has


def _fit_prefill(points: list[AttentionPoint], curve: AttentionCurve, verify: bool) -> AttentionCurve:
    """Fits prefill's rate, which is decoding's too unless verification has shown one."""
    rate = curve.flops
    if points:

        def make(x: np.ndarray) -> AttentionCurve:
            return dataclasses.replace(curve, prefill_flops=float(x[0]))

        rate = _fit(points, make, predict_attention, [curve.prefill_flops]).prefill_flops
    return dataclasses.replace(curve, prefill_flops=rate, flops=curve.flops if verify else rate)


def fit_experts(points: list[ExpertPoint], gemm: GemmCurve) -> ExpertCurve:
    """Fits launch, bandwidth and rate, starting from the dense product's.

    The launch stays that one where no expert lacks tokens, and the rate where none has many: reading weights
    hides both.
    """
    loads = [p.rows * p.experts_per_token / p.experts for p in points]
    fits_launch, fits_rate = min(loads) < FEW_TOKENS, max(loads) >= MANY_TOKENS

    def make(x: np.ndarray) -> ExpertCurve:
        launch = x[-1] if fits_launch else gemm.launch_seconds
        return ExpertCurve(launch, x[0], x[1] if fits_rate else gemm.flops)

    start = [
        gemm.bandwidth,
        *([gemm.flops] if fits_rate else []),
        *([gemm.launch_seconds] if fits_launch else []),
    ]
    return _fit(points, make, predict_experts, start)


def fit_rest(points: list[RestPoint], start: OtherCurve) -> OtherCurve:
    def make(x: np.ndarray) -> OtherCurve:
        return OtherCurve(x[0], x[1], x[2], x[3])

    first = [start.layer_seconds, start.bandwidth, start.sampler_elements_per_second, start.layer_seconds]
    return _fit(points, make, predict_rest, first)


def fit_other_on_steps(points: list[StepPoint], hardware: Hardware, sampler_known: bool) -> Hardware:
    """Fits what whole steps cost beyond their operators.

    That is the fixed part of a layer and, where it was not timed alone, the sampler's rate.
    """
    known = hardware.kernels.other

    def make(x: np.ndarray) -> Hardware:
        rate = known.sampler_elements_per_second if sampler_known else x[1]
        other = dataclasses.replace(known, layer_seconds=x[0], sampler_elements_per_second=rate)
        return dataclasses.replace(hardware, kernels=dataclasses.replace(hardware.kernels, other=other))

    return _fit(points, make, predict_step, [known.layer_seconds] if sampler_known else [5e-6, 1e11])
