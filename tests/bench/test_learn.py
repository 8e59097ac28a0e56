"""`bench learn`: the workload, the formula of its MFU, and how kernels are counted to parts."""

import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType
from typer.testing import CliRunner

from paceline.bench.learn import LearnWorkload, active_parameters, model_operations
from paceline.bench.learn_parts import attribute_kernels
from paceline.bench.lengths import Lengths
from paceline.cli.main import app
from paceline.policy.config import DecoderConfig
from paceline.policy.shapes import SHAPES


def test_default_workload_is_the_documented_one():
    workload = LearnWorkload(192, 8, Lengths.parse("lognormal:1196,1.0,16,6000", 64).values)
    assert (sum(workload.lengths), max(workload.lengths), len(workload.lengths)) == (84039, 6192, 64)
    groups = workload.groups(100)
    assert [len(group.samples) for group in groups] == [8] * 8
    sizes = [len(s.completion.request.prompt) + len(s.completion.tokens) for g in groups for s in g.samples]
    assert sizes == workload.lengths
    assert (
        groups == workload.groups(100) and len({g.samples[0].completion.request.prompt for g in groups}) == 8
    )


def test_model_operations_match_a_decoder_counted_by_hand():
    shape = DecoderConfig("llama", 10, 4, 6, 2, 2, 1, 2, 64, tie_embeddings=True)
    layer = 4 * (4 + 2 * 2) + 4 * 4 + 3 * 4 * 6 + 2 * 4
    parameters = 2 * layer + 4 + 10 * 4
    attention = (
        3 * 2 * 2 * (2 * 2) * (3 * 3 + 5 * 5) / 2 * 2
    )  # passes x layers x (QK, PV) x operations, causal
    assert model_operations(shape, [3, 5]) == 6 * parameters * 8 + attention


def test_model_operations_leave_out_experts_that_a_token_does_not_pass():
    moe = SHAPES["qwen3-30b-a3b"]
    assert 3.2e9 < active_parameters(moe) < 3.5e9 < moe.num_parameters
    assert active_parameters(SHAPES["qwen3-4b"]) == SHAPES["qwen3-4b"].num_parameters


@dataclass
class Event:
    name: str
    kernels: list = field(default_factory=list)
    cpu_parent: "Event | None" = None
    device_type: DeviceType = DeviceType.CPU
    device_time_total: float = 0.0
    is_user_annotation: bool = False


def test_kernels_are_counted_once_to_the_part_that_launched_them():
    def kernel(name: str, microseconds: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, duration=microseconds)

    head = Event("_HeadLogprobsBackward")
    again = Event("paceline::recompute")
    linked = [
        Event("aten::mm", [kernel("nvjet_gemm", 3e6)]),
        Event("aten::mm", [kernel("nvjet_gemm", 1e6)], head),
        Event("aten::mm", [kernel("nvjet_gemm", 0.5e6)], again),
        Event("_Flash", [kernel("flash_fwd", 2e6)]),
    ]
    on_device = [
        Event("nvjet_gemm", device_type=DeviceType.CUDA, device_time_total=4.5e6),
        Event("flash_fwd", device_type=DeviceType.CUDA, device_time_total=2e6),
        Event("_adamw_kernel", device_type=DeviceType.CUDA, device_time_total=0.25e6),
        Event(
            "paceline::optimiser", device_type=DeviceType.CUDA, device_time_total=9e6, is_user_annotation=True
        ),
    ]
    profile = attribute_kernels([*linked, *on_device], seconds=7.0)
    assert vars(profile.parts) == pytest.approx(
        dict(products=3, attention=2, between=0, head=1, recomputation=0.5, optimiser=0.25, host=0.25)
    )
    assert profile.kernels[0] == ("nvjet_gemm", 1, pytest.approx(4.5))


def test_bench_learn_runs_on_a_cpu(tmp_path):
    sizes = ["--prompts", "2", "--samples", "2", "--lengths", "fixed:8", "--prompt", "4", "--repeats", "1"]
    command = ["bench", "learn", *sizes, "--json", str(tmp_path / "f.json"), "policy.lora.rank=4"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["point"]["tokens"] == 48 and figures["point"]["tokens_per_second"] > 0
    assert "tok/s" in result.output and "first update" in result.output
