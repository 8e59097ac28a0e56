"""From measured points to a hardware profile. Only points marked `fit` are looked at.

Each part of the profile is fitted to points of its own, then what is left of a whole step (`other`) to one or
two steps; so a part that was never measured alone is visible as such in the provenance.
"""

import dataclasses

import numpy as np

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
from paceline.simulate.least_squares import fit_positive
from paceline.simulate.points import (
    FIT,
    AttentionPoint,
    ExpertPoint,
    GemmPoint,
    Measurements,
    RestPoint,
    StepPoint,
)
from paceline.simulate.predict import (
    predict_attention,
    predict_experts,
    predict_gemm,
    predict_rest,
    predict_step,
)

CUBLAS_ROWS = 65  # the native engine's own kernel below, cuBLAS from here on (kernels/linear.py)


def fit_hardware(
    name: str,
    measurements: Measurements,
    sheet: DataSheet,
    links: Links,
    training: Training,
    row_tile: int = 1,
) -> Hardware:
    gemm = fit_gemm(
        _gemms(measurements, "bf16"), GemmCurve(4e-6, sheet.bandwidth, sheet.bf16_flops, 30.0, 2.5, row_tile)
    )
    fp8_points = _gemms(measurements, "fp8")
    fp8 = fit_fp8(fp8_points, gemm, sheet) if fp8_points else None
    attention = fit_attention(
        [p for p in measurements.attention if p.use == FIT],
        AttentionCurve(8e-6, sheet.bandwidth, 1e-10, 1e14, 3e14),
        gemm,
    )
    other = OtherCurve(5e-6, gemm.bandwidth, 1e12)
    rest = [p for p in measurements.rest if p.use == FIT]
    expert_points = [p for p in measurements.experts if p.use == FIT]
    experts = (
        fit_experts(expert_points, gemm)
        if expert_points
        else ExpertCurve(gemm.launch_seconds, gemm.bandwidth, gemm.flops)
    )
    if rest:
        other = fit_rest(rest, other)
    hardware = Hardware(name, sheet, Kernels(gemm, fp8, attention, other, experts), links, training, {})
    steps = [
        p
        for p in measurements.steps
        if p.use == FIT and p.engine == "paceline" and p.layer == "engine" and not p.prefill
    ]
    if steps:
        hardware = fit_other_on_steps(steps, hardware, sampler_known=bool(rest))
    origin = f"{measurements.device}, {measurements.software}, {measurements.date}"
    fitted = Origin(Source.MEASURED, f"curve through measured points: {origin}")
    on_steps = Origin(Source.FITTED, f"what {len(steps)} whole decode steps leave over: {origin}")
    provenance = {
        "data_sheet": Origin(Source.ASSUMED, "the vendor's figures"),
        "gemm_bf16": fitted,
        "gemm_fp8": fitted if fp8 else Origin(Source.ASSUMED, "none"),
        "attention": fitted,
        "other": on_steps if steps else fitted,
        "experts": fitted
        if expert_points
        else Origin(Source.ASSUMED, "the dense product's launch, bandwidth and rate; never timed"),
        "links": Origin(
            Source.ASSUMED,
            "one device was measured; data-sheet bandwidth x 0.7, latencies of published collectives",
        ),
        "training": Origin(Source.ASSUMED, "share of the data sheet's rate; never measured"),
    }
    return dataclasses.replace(hardware, provenance=provenance)


def _gemms(measurements: Measurements, precision: str) -> list[GemmPoint]:
    return [
        p
        for p in measurements.gemms
        if p.use == FIT and p.precision == precision and (p.kernel != "cublas" or p.rows >= CUBLAS_ROWS)
    ]


def _with_gemm(curve: GemmCurve) -> Kernels:
    nothing = AttentionCurve(1e-6, 1e12, 1e-12, 1e14, 1e14)
    return Kernels(curve, curve, nothing, OtherCurve(0, 1e12, 1e12), ExpertCurve(1e-6, 1e12, 1e14))


def fit_gemm(points: list[GemmPoint], start: GemmCurve) -> GemmCurve:
    def curve(x: np.ndarray) -> GemmCurve:
        return dataclasses.replace(
            start, launch_seconds=x[0], bandwidth=x[1], flops=x[2], half_rows=x[3], sharpness=1 + x[4]
        )

    def predict(x: np.ndarray) -> np.ndarray:
        return np.array([predict_gemm(_with_gemm(curve(x)), p) for p in points])

    first = np.array(
        [start.launch_seconds, start.bandwidth, start.flops, start.half_rows, start.sharpness - 1]
    )
    return curve(fit_positive(predict, np.array([p.seconds for p in points]), first))


def fit_fp8(points: list[GemmPoint], bf16: GemmCurve, sheet: DataSheet) -> GemmCurve:
    """Bandwidth and knee of the 16-bit product: the memory is the same."""

    def curve(x: np.ndarray) -> GemmCurve:
        return dataclasses.replace(bf16, launch_seconds=x[0], flops=x[1])

    def predict(x: np.ndarray) -> np.ndarray:
        return np.array([predict_gemm(_with_gemm(curve(x)), p) for p in points])

    return curve(
        fit_positive(predict, np.array([p.seconds for p in points]), np.array([1e-5, sheet.fp8_flops]))
    )


def fit_attention(points: list[AttentionPoint], start: AttentionCurve, gemm: GemmCurve) -> AttentionCurve:
    """Prefill gives an arithmetic rate; decoding, which hardly shows one, borrows it unless deep verification
    was measured.
    """
    decode, prefill = [p for p in points if not p.new], [p for p in points if p.new]
    kernels = _with_gemm(gemm)
    verify, many = (
        any(p.queries > 4 for p in decode),
        len(decode) >= 8,
    )  # few points cannot tell a row's cost from its keys'

    def with_rate(curve: AttentionCurve) -> AttentionCurve:
        def predict(x: np.ndarray) -> np.ndarray:
            attention = dataclasses.replace(curve, prefill_flops=x[0])
            return np.array(
                [predict_attention(dataclasses.replace(kernels, attention=attention), p) for p in prefill]
            )

        rate = (
            float(
                fit_positive(
                    predict, np.array([p.seconds for p in prefill]), np.array([curve.prefill_flops])
                )[0]
            )
            if prefill
            else curve.flops
        )
        return dataclasses.replace(curve, prefill_flops=rate, flops=curve.flops if verify else rate)

    start = with_rate(start)

    def curve(x: np.ndarray) -> AttentionCurve:
        return dataclasses.replace(
            start,
            launch_seconds=x[0],
            bandwidth=x[1],
            serial_seconds_per_key=x[2],
            flops=x[3] if verify else start.flops,
            row_seconds=x[-1] if many else 0.0,
        )

    def predict(x: np.ndarray) -> np.ndarray:
        return np.array(
            [predict_attention(dataclasses.replace(kernels, attention=curve(x)), p) for p in decode]
        )

    first = (
        [start.launch_seconds, start.bandwidth, start.serial_seconds_per_key]
        + [start.flops] * verify
        + [start.launch_seconds / 100] * many
    )
    return with_rate(
        curve(fit_positive(predict, np.array([p.seconds for p in decode]), np.array(first)))
    )  # now with the launch it found


def fit_experts(points: list[ExpertPoint], gemm: GemmCurve) -> ExpertCurve:
    def curve(x: np.ndarray) -> ExpertCurve:
        return ExpertCurve(x[0], x[1], x[2])

    def predict(x: np.ndarray) -> np.ndarray:
        return np.array(
            [predict_experts(dataclasses.replace(_with_gemm(gemm), experts=curve(x)), p) for p in points]
        )

    return curve(
        fit_positive(
            predict,
            np.array([p.seconds for p in points]),
            np.array([gemm.launch_seconds, gemm.bandwidth, gemm.flops]),
        )
    )


def fit_rest(points: list[RestPoint], start: OtherCurve) -> OtherCurve:
    def curve(x: np.ndarray) -> OtherCurve:
        return OtherCurve(x[0], x[1], x[2], x[3])

    def predict(x: np.ndarray) -> np.ndarray:
        kernels = _with_gemm(GemmCurve(1e-6, 1e12, 1e14, 1.0, 2.0))
        return np.array([predict_rest(dataclasses.replace(kernels, other=curve(x)), p) for p in points])

    first = np.array(
        [start.layer_seconds, start.bandwidth, start.sampler_elements_per_second, start.layer_seconds]
    )
    return curve(fit_positive(predict, np.array([p.seconds for p in points]), first))


def fit_other_on_steps(points: list[StepPoint], hardware: Hardware, sampler_known: bool) -> Hardware:
    """What whole steps cost beyond their operators: the fixed part of a layer and, where it was not timed
    alone, the sampler's rate.
    """
    known = hardware.kernels.other

    def curve(x: np.ndarray) -> Hardware:
        rate = known.sampler_elements_per_second if sampler_known else x[1]
        other = dataclasses.replace(known, layer_seconds=x[0], sampler_elements_per_second=rate)
        return dataclasses.replace(hardware, kernels=dataclasses.replace(hardware.kernels, other=other))

    def predict(x: np.ndarray) -> np.ndarray:
        return np.array([predict_step(curve(x), p) for p in points])

    first = [known.layer_seconds] if sampler_known else [5e-6, 1e11]
    return curve(fit_positive(predict, np.array([p.seconds for p in points]), np.array(first)))
