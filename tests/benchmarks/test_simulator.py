"""The simulator's profile and its notes: fits recover what made the points, and the notes are up to date."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch

from benchmarks.simulator import h200, validate
from benchmarks.simulator.calibrate import fit_report, profile_from, write_hardware
from benchmarks.simulator.check import median_error, predictions, worst_error
from benchmarks.simulator.fit import fit_gemm, fit_hardware
from benchmarks.simulator.measure import measure_kernels
from benchmarks.simulator.measure_grid import CPU
from benchmarks.simulator.measure_steps import StepBench
from benchmarks.simulator.points import GemmPoint, load_measurements, write_measurements
from benchmarks.simulator.predict import predict_gemm
from paceline.bench.lengths import LengthDistribution
from paceline.models.source import BUILTIN_POLICIES
from paceline.simulate.deployment import ENGINES
from paceline.simulate.hardware import GemmCurve, load_hardware

NOTES = Path(__file__).parents[2] / "benchmarks" / "notes"
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
H200 = load_hardware("h200")


@pytest.mark.slow
def test_fit_recovers_the_planted_profile_and_the_shipped_one():
    planted = GemmCurve(5e-6, 3e12, 5e14, 20.0, 2.2)
    shapes = [((n, k, 1),) for n in (2048, 8192, 50000) for k in (2048, 8192)]
    points = [GemmPoint(rows, shape, 1.0) for shape in shapes for rows in (1, 16, 64, 200, 1000, 4000)]
    points = [dataclasses.replace(p, seconds=predict_gemm(planted, p)) for p in points]
    found = fit_gemm(points, GemmCurve(1e-6, 1e12, 1e15, 5.0, 3.0))
    for point in points:
        assert predict_gemm(found, point) == pytest.approx(point.seconds, rel=0.01)
    ours = h200.our_measurements()
    again = fit_hardware("h200", ours, H200.data_sheet, H200.links, H200.training)
    for part in ("gemm_bf16", "gemm_fp8", "attention", "other", "experts"):
        shipped = dataclasses.asdict(getattr(H200.kernels, part))
        assert dataclasses.asdict(getattr(again.kernels, part)) == pytest.approx(shipped, rel=1e-3), part
    step, row = h200.fit_engine(H200, ours, "vllm")
    assert ENGINES["vllm"].step_seconds == pytest.approx(step, rel=0.02)
    assert ENGINES["vllm"].row_seconds == pytest.approx(row, rel=0.02)


@pytest.mark.slow
def test_calibrate_on_a_cpu_writes_points_and_a_profile(tmp_path, monkeypatch, cpu_clock):
    small = dict(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16)
    dense = dataclasses.replace(CPU.dense, **small, intermediate_size=96, vocab_size=256)
    experts = dataclasses.replace(CPU.experts, num_experts=4, hidden_size=64, expert_intermediate_size=32)
    sizes = dict(gemm_rows=(1, 32, 96), attention=CPU.attention[:8], tokens=(1, 8, 32))
    few = dict(expert_rows=(1, 8, 32, 64), copies_bytes=1, repeats=1)
    grid = dataclasses.replace(CPU, dense=dense, experts=experts, **sizes, **few)
    points = measure_kernels(torch.device("cpu"), grid, print, "2026-01-01")
    write_hardware(profile_from("here", points), tmp_path / "here.json")
    hardware = load_hardware(str(tmp_path / "here.json"))
    assert hardware.provenance["gemm_bf16"].source == "measured"
    assert all(math.isfinite(report.worst) for report in fit_report(hardware, points))
    monkeypatch.setattr("benchmarks.simulator.measure_steps.NEW_TOKENS", 6)
    bench = StepBench(str(BUILTIN_POLICIES["builtin"]), torch.device("cpu"), math.inf, print)
    bench.decode([(2, 8, 0), (2, 8, 3)], seen=((2, 8, 0),))
    bench.rollout(3, 8, LengthDistribution(20, 1.0, 16, 32))
    assert [(p.queries, p.prefill, p.use) for p in bench.steps] == [
        (1, 0, "fit"),
        (1, 8, "held-out"),
        (4, 0, "held-out"),
    ]
    points = dataclasses.replace(points, steps=tuple(bench.steps), rollouts=tuple(bench.rollouts))
    write_measurements(points, tmp_path / "points.json")
    assert load_measurements(tmp_path / "points.json") == points


@pytest.mark.slow
def test_notes_are_what_validate_writes_and_their_errors_are_within_the_aim(tmp_path):
    made = validate.sections(H200, h200.our_measurements())
    validate.write(tmp_path, made)
    for file in tmp_path.iterdir():
        lines, written = file.read_text().splitlines(), (NOTES / file.name).read_text().splitlines()
        assert len(lines) == len(written), file.name
        for line, other in zip(lines, written, strict=True):
            assert same_figures(line, other), (file.name, line, other)
    for section in made[:2]:
        own = [check for check in predictions(section.checks) if "prefill" not in check.what]
        assert median_error(own) < 0.10 and worst_error(own) < 0.20


def same_figures(made: str, written: str) -> bool:
    """Returns whether words are equal, and numbers to what another CPU's last bits may move: two units of the
    last digit shown.
    """
    if NUMBER.sub("#", made) != NUMBER.sub("#", written):
        return False
    for ours, theirs in zip(NUMBER.findall(made), NUMBER.findall(written), strict=True):
        tolerance = 2.01 * 10.0 ** -len(theirs.partition(".")[2])
        figure = pytest.approx(float(theirs.replace(",", "")), abs=tolerance, rel=1e-4)
        if float(ours.replace(",", "")) != figure:
            return False
    return True
