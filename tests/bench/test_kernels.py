"""The kernel bench: figures for every kernel that model and device have, and none for a wrong one."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from paceline.bench.kernels import run
from paceline.bench.kernels.attention import attention_cases
from paceline.bench.kernels.limits import DeviceLimits
from paceline.bench.kernels.products import projections
from paceline.bench.kernels.workload import Operands
from paceline.cli.main import app
from paceline.policy.config import DecoderConfig
from paceline.policy.shapes import SHAPES

CPU = torch.device("cpu")
LIMITS = DeviceLimits(bytes_per_second=1e9, flops=1e9, fp8_flops=None)
EXPERTS = DecoderConfig(
    "qwen3_moe",
    97,
    32,
    64,
    2,
    2,
    1,
    16,
    256,
    num_experts=4,
    num_experts_per_token=2,
    expert_intermediate_size=32,
    dense_layers=(0,),
)


def test_every_kernel_is_right_and_timed():
    names = run.choose_kernels([], EXPERTS, CPU)
    assert names == list(run.CASES)
    points = list(run.bench_kernels(EXPERTS, CPU, names, LIMITS, repeats=1))
    assert {point.kernel for point in points} == set(names)
    for point in points:
        assert point.correct, f"{point.kernel} {point.size}: {point.error}"
        assert point.microseconds.median > 0
        assert (point.limit_microseconds is None) == (point.kernel == "history")
    head = next(point for point in points if point.size == "head 97 x 32, 8 rows")
    assert head.limit_microseconds == pytest.approx(1e6 * 2 * 8 * 97 * 32 / 1e9), "bound by arithmetic"


def test_a_wrong_kernel_is_named_and_not_timed(monkeypatch, tmp_path):
    def spoilt(operands: Operands):
        for case in attention_cases(operands):
            yield replace(case, error=lambda: 0.5)

    monkeypatch.setitem(run.CASES, "attention", spoilt)
    figures = tmp_path / "figures.json"
    arguments = ["bench", "kernels", "--only", "attention,sampler", "--repeats", "1", "--json", str(figures)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1 and "WRONG: differs from torch's result by 5.0e-01" in result.output
    points = json.loads(figures.read_text())["points"]
    assert {p["kernel"]: p["microseconds"] is None for p in points} == {"attention": True, "sampler": False}


@pytest.mark.parametrize(
    "only, message",
    [
        ("linear,gemm", "--only 'gemm': must be of linear, fp8-linear"),
        ("experts", "--only 'experts': this model has no experts"),
    ],
)
def test_what_cannot_be_measured_is_refused(only, message):
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(app, ["bench", "kernels", "--only", only], catch_exceptions=False)


def test_the_help_names_every_kernel():
    text = CliRunner().invoke(app, ["bench", "kernels", "--help"], terminal_width=200).output
    assert all(name in text for name in run.CASES)


def test_projections_are_those_of_the_model():
    assert projections(SHAPES["qwen3-8b"]) == {
        "qkv": (6144, 4096),
        "output": (4096, 4096),
        "gate_up": (24576, 4096),
        "down": (4096, 12288),
    }
    assert list(projections(SHAPES["qwen3-30b-a3b"])) == ["qkv", "output"], "the rest are experts"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-30b-a3b"])
def test_every_kernel_is_right_on_a_gpu(shape):
    device = torch.device("cuda")
    names = run.choose_kernels([], SHAPES[shape], device)
    wrong = [
        f"{point.kernel} {point.size}: {point.error}"
        for point in run.bench_kernels(SHAPES[shape], device, names, LIMITS, repeats=1)
        if not point.correct
    ]
    assert not wrong
