"""The measuring code on a CPU: every operator is timed, and the fit makes a profile that simulates."""

import dataclasses
import math

import torch

from paceline.bench.lengths import LengthDistribution
from paceline.policy.shapes import SHAPES
from paceline.simulate.calibrate import fit_report, profile_from
from paceline.simulate.hardware import load_hardware, write_hardware
from paceline.simulate.measure import measure_kernels
from paceline.simulate.measure_grid import CPU
from paceline.simulate.measure_steps import StepBench
from paceline.simulate.model_shape import from_decoder_config
from paceline.simulate.scenario import Scenario, simulate
from paceline.simulate.workload import Lengths, Workload

TINY = dataclasses.replace(
    CPU,
    dense=dataclasses.replace(
        CPU.dense,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        vocab_size=256,
    ),
    experts=dataclasses.replace(CPU.experts, num_experts=4, hidden_size=64, expert_intermediate_size=32),
    gemm_rows=(1, 32, 96),
    attention=CPU.attention[:8],
    tokens=(1, 8, 32),
    expert_rows=(1, 8, 32, 64),
    copies_bytes=1,
    repeats=1,
)


def test_calibrating_makes_a_profile_that_simulates(tmp_path):
    notes = []
    points = measure_kernels(torch.device("cpu"), TINY, notes.append, "2026-01-01")
    assert (
        len(points.gemms) == 15
        and len(points.attention) == 11
        and len(points.rest) == 6
        and len(points.experts) == 4
    )
    assert {p.use for p in points.gemms} == {"fit", "held-out"}
    assert all(p.seconds > 0 for p in (*points.gemms, *points.attention, *points.rest, *points.experts))
    write_hardware(profile_from("here", points), tmp_path / "here.json")
    hardware = load_hardware(str(tmp_path / "here.json"))
    assert (
        hardware.provenance["gemm_bf16"].source == "measured"
        and hardware.provenance["links"].source == "assumed"
    )
    assert all(math.isfinite(report.worst) for report in fit_report(hardware, points))
    shape = dataclasses.replace(from_decoder_config("tiny", SHAPES["smollm2-135m"]), num_layers=2)
    outcome = simulate(
        Scenario(hardware, shape, gpus=1, workload=Workload(2, 2, 8, Lengths(20, 0.5, 4, 64)), max_running=4)
    )
    assert outcome.rollout_seconds > 0 and outcome.tokens == outcome.generated_tokens


def test_whole_steps_are_timed_with_and_without_verification(monkeypatch, cpu_clock):
    monkeypatch.setattr("paceline.simulate.measure_steps.NEW_TOKENS", 6)
    notes = []
    bench = StepBench(_tiny_folder(), torch.device("cpu"), math.inf, notes.append)
    bench.decode([(2, 8, 0), (2, 8, 3)], seen=((2, 8, 0),))
    bench.rollout(3, 8, LengthDistribution(20, 1.0, 16, 32))
    assert [(p.rows, p.queries, p.prefill, p.use) for p in bench.steps] == [
        (2, 1, 0, "fit"),
        (2, 1, 8, "held-out"),
        (2, 4, 0, "held-out"),
    ]
    assert all(p.seconds > 0 for p in (*bench.steps, *bench.rollouts))
    bench.deadline = 0.0
    bench.decode([(2, 8, 0)])
    assert len(bench.steps) == 3 and "out of time" in notes[-1]


def _tiny_folder() -> str:
    from paceline.models.source import BUILTIN_POLICIES

    return str(BUILTIN_POLICIES["builtin"])
