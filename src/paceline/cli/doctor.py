"""`paceline doctor`: what this machine can run, each line from a trial rather than from a version number."""

import importlib.util
import os
import platform
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Finding:
    """One thing that was tried, and what came of it."""

    what: str
    works: bool
    detail: str


def examine() -> list[Finding]:
    """Tries what this machine can run, and returns what was found."""
    return [
        Finding("python", True, platform.python_version()),
        Finding("torch", True, f"{torch.__version__}, {os.cpu_count()} cores, {platform.machine()}"),
        _gpu(),
        _triton(),
        _package("transformers", "the oracle of the policy tests"),
        _package("tensorboard", "report.tensorboard=true; pip install 'paceline[tensorboard]'"),
        _package("wandb", "report.wandb=true; pip install 'paceline[wandb]'"),
    ]


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        built = (
            "this torch is a CPU build"
            if torch.version.cuda is None
            else "torch finds no usable driver or device"
        )
        return Finding("gpu", False, f"{built}; runs use the CPU")
    properties = torch.cuda.get_device_properties(0)
    return Finding(
        "gpu",
        True,
        f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, {torch.cuda.device_count()} device(s)",
    )


def _triton() -> Finding:
    if importlib.util.find_spec("triton") is None:
        return Finding("triton", False, "not installed; the torch references run instead")
    import triton

    return Finding(
        "triton",
        torch.cuda.is_available(),
        triton.__version__ if torch.cuda.is_available() else f"{triton.__version__}, but no GPU to run on",
    )


def _package(name: str, purpose: str) -> Finding:
    found = importlib.util.find_spec(name) is not None
    return Finding(name, found, purpose)
