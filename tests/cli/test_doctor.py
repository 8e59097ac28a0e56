"""`paceline doctor` tells the truth about the machine it runs on, and about machines that this one is not."""

import importlib.util
import sys
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from paceline.cli.doctor import OPTIONAL_PACKAGES, Finding, examine
from paceline.config.extras import Extra


def findings() -> dict[str, Finding]:
    return {finding.what: finding for finding in examine()}


def pretend_gpu(monkeypatch, capability: tuple[int, int]) -> None:
    properties = SimpleNamespace(name="NVIDIA Test", total_memory=80e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: capability)


def test_doctor_lists_what_every_machine_has():
    found = findings()
    assert found["python"].works and found["python"].detail == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"].works and torch.__version__ in found["torch"].detail
    assert found["gpu"].works == torch.cuda.is_available()


@pytest.mark.parametrize("cuda, reason", [(None, "CPU build"), ("13.0", "no usable driver or device")])
def test_doctor_reports_why_there_is_no_gpu(cuda, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    gpu = findings()["gpu"]
    assert not gpu.works and reason in gpu.detail and "runs use the CPU" in gpu.detail


@pytest.mark.parametrize(
    "capability, bf16, fp8", [((7, 5), False, False), ((8, 0), True, False), ((9, 0), True, True)]
)
def test_doctor_precisions_follow_the_gpu(capability, bf16, fp8, monkeypatch):
    pretend_gpu(monkeypatch, capability)
    found = findings()
    assert "NVIDIA Test, 80 GB, 2 device(s)" in found["gpu"].detail
    assert f"compute capability {capability[0]}.{capability[1]}" in found["gpu"].detail
    assert found["bf16 rollouts"].works == bf16 and found["fp8 rollouts"].works == fp8


def test_doctor_reports_that_triton_cannot_run_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not findings()["triton"].works
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "the torch references run instead" in findings()["triton"].detail


def test_doctor_lists_optional_packages_found_and_missing(monkeypatch):
    assert {extra for _, _, extra in OPTIONAL_PACKAGES} == set(get_args(Extra)), (
        "an extra that doctor does not list"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else object())
    found = findings()
    assert found["gguf"].works and "pip install" not in found["gguf"].detail
    assert not found["wandb"].works and "pip install -e '.[wandb]'" in found["wandb"].detail
