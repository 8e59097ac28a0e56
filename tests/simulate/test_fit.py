"""Fits recover what made the points, and the shipped profile is the fit of the shipped points."""

import dataclasses

import numpy as np
import pytest

from paceline.simulate.calibrate import fit_report, matching_profile, profile_from
from paceline.simulate.deployment import ENGINES
from paceline.simulate.fit import fit_attention, fit_experts, fit_gemm, fit_hardware, fit_rest
from paceline.simulate.hardware import AttentionCurve, ExpertCurve, GemmCurve, OtherCurve, load_hardware
from paceline.simulate.least_squares import fit_positive
from paceline.simulate.points import (
    AttentionPoint,
    ExpertPoint,
    GemmPoint,
    RestPoint,
    load_measurements,
    write_measurements,
)
from paceline.simulate.predict import predict_kernel
from paceline.simulate.validation import h200
from paceline.simulate.validation.check import median_error, predictions, worst_error

H200 = load_hardware("h200")
POINTS = h200.shipped_measurements()


def test_least_squares_finds_the_parameters_of_noisy_data():
    x = np.linspace(1, 50, 40)
    noise = np.exp(0.01 * np.random.default_rng(0).standard_normal(40))
    found = fit_positive(lambda p: p[0] + p[1] * x, (3.0 + 0.2 * x) * noise, np.array([1.0, 1.0]))
    assert np.allclose(found, [3.0, 0.2], rtol=0.05)


def test_curves_are_recovered_from_points_they_made():
    kernels = dataclasses.replace(
        H200.kernels,
        gemm_bf16=GemmCurve(5e-6, 3e12, 5e14, 20.0, 2.2),
        attention=AttentionCurve(9e-6, 2.5e12, 8e-10, 2e14, 3e14, 3e-8),
        other=OtherCurve(4e-6, 2e12, 9e10, 7e-6),
        experts=ExpertCurve(6e-6, 2e12, 4e14),
    )
    shapes = [(n, k) for n in (2048, 8192, 50000) for k in (2048, 8192)]
    gemms = [GemmPoint(m, ((n, k, 1),), 1.0) for n, k in shapes for m in (1, 16, 64, 200, 1000, 4000)]
    gemms = [dataclasses.replace(p, seconds=predict_kernel(kernels, p)) for p in gemms]
    gemm = fit_gemm(gemms, GemmCurve(1e-6, 1e12, 1e15, 5.0, 3.0))
    attention = [
        AttentionPoint(32, 8, 128, (c,) * r, 1.0, q)
        for r in (1, 8, 64, 256)
        for c in (200, 3000, 20000)
        for q in (1, 8)
    ]
    attention += [AttentionPoint(32, 8, 128, (0,), 1.0, 1, n) for n in (1000, 8000)]
    attention = [dataclasses.replace(p, seconds=predict_kernel(kernels, p)) for p in attention]
    attend = fit_attention(attention, AttentionCurve(1e-6, 1e12, 1e-10, 1e14, 1e14))
    rest = [RestPoint(t, 4096, 6144, 12288, 1.0) for t in (1, 64, 4096)] + [
        RestPoint(t, 0, 0, 0, 1.0, 150000) for t in (1, 64, 512)
    ]
    rest = [dataclasses.replace(p, seconds=predict_kernel(kernels, p)) for p in rest]
    experts = [ExpertPoint(r, 128, 8, 2048, 768, 1.0) for r in (1, 8, 64, 512, 4096)]
    experts = [dataclasses.replace(p, seconds=predict_kernel(kernels, p)) for p in experts]
    fitted = dataclasses.replace(
        kernels,
        gemm_bf16=gemm,
        attention=attend,
        other=fit_rest(rest, OtherCurve(1e-6, 1e12, 1e11)),
        experts=fit_experts(experts, gemm),
    )
    for point in (*gemms, *attention, *rest, *experts):
        assert predict_kernel(fitted, point) == pytest.approx(point.seconds, rel=0.01), point
    many, few = fit_experts(experts[2:], gemm), fit_experts(experts[:3], gemm)
    assert many.launch_seconds == gemm.launch_seconds, "large batches hide it"
    assert few.flops == gemm.flops, "and small ones what arithmetic takes"
    for curve in (many, few):
        assert curve.bandwidth == pytest.approx(kernels.experts.bandwidth, rel=0.1)


def test_the_shipped_profile_is_the_fit_of_the_shipped_points():
    again = fit_hardware("h200", POINTS, H200.data_sheet, H200.links, H200.training)
    for part in ("gemm_bf16", "gemm_fp8", "attention", "other", "experts"):
        for field, value in dataclasses.asdict(getattr(H200.kernels, part)).items():
            assert getattr(getattr(again.kernels, part), field) == pytest.approx(value, rel=1e-3), (
                part,
                field,
            )


def test_an_engines_overheads_are_those_its_two_points_give():
    step, row = h200.fit_engine(H200, POINTS, "vllm")
    assert ENGINES["vllm"].step_seconds == pytest.approx(step, rel=0.02)
    assert ENGINES["vllm"].row_seconds == pytest.approx(row, rel=0.02)


def test_held_out_decode_verify_and_rollout_times_are_within_the_aim():
    own = [
        c for c in predictions(h200.step_section(H200, POINTS, "paceline").checks) if "prefill" not in c.what
    ]
    assert len(own) >= 15
    assert median_error(own) < 0.10 and worst_error(own) < 0.20
    peers = predictions(h200.step_section(H200, POINTS, "vllm").checks)
    assert median_error(peers) < 0.10 and worst_error(peers) < 0.20


def test_points_survive_writing(tmp_path):
    write_measurements(POINTS, tmp_path / "points.json")
    assert load_measurements(tmp_path / "points.json") == POINTS


def test_a_profile_from_points_keeps_what_kernels_cannot_tell():
    """The device's name finds the data sheet; FP8 that was not measured again stays as it was."""
    assert (
        matching_profile("NVIDIA H200") == "h200"
        and matching_profile("NVIDIA GB200") == "gb200"
        and matching_profile("CPU") is None
    )
    bf16_only = dataclasses.replace(POINTS, gemms=tuple(p for p in POINTS.gemms if p.precision == "bf16"))
    profile = profile_from("again", bf16_only)
    assert profile.data_sheet == H200.data_sheet and profile.kernels.gemm_fp8 == H200.kernels.gemm_fp8
    assert {report.part for report in fit_report(profile, bf16_only)} == {"products", "attention", "experts"}
