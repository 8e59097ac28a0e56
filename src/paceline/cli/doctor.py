"""`paceline doctor`: what this machine can run.

Each finding is tried rather than read off a version number, and a missing one is reported with its purpose
and how to install it.
"""

import importlib.util
import os
import platform
from dataclasses import dataclass

import torch

from paceline.config.extras import Extra, install_command
from paceline.device import BF16_CAPABILITY, FP8_CAPABILITY

# Optional packages: the module to look for, what it is for, and the extra that brings it.
OPTIONAL_PACKAGES: tuple[tuple[str, str, Extra], ...] = (
    ("gguf", "paceline models get", "models"),
    ("reasoning_gym", "task.name=reasoning-gym", "reasoning"),
    ("math_verify", "the reward function math-verify", "math"),
    ("pyarrow", "parquet files as tasks", "data"),
    ("tensorboard", "report.tensorboard=true", "tensorboard"),
    ("wandb", "report.wandb=true", "wandb"),
    ("trackio", "report.trackio=true", "trackio"),
    ("mlflow", "report.mlflow=true", "mlflow"),
    ("ray", "paceline launch", "cluster"),
    ("uvicorn", "paceline serve", "serve"),
)


@dataclass(frozen=True)
class Finding:
    """One line of the report: a capability, whether this machine has it, and why not or what for."""

    what: str
    works: bool
    detail: str


def examine() -> list[Finding]:
    return [
        Finding("python", True, platform.python_version()),
        Finding("torch", True, f"{torch.__version__}, {os.cpu_count()} cores, {platform.machine()}"),
        *_gpu(),
        _triton(),
        *(_package(*entry) for entry in OPTIONAL_PACKAGES),
    ]


def _gpu() -> list[Finding]:
    """The GPU, and the number formats of a rollout that it computes in."""
    if not torch.cuda.is_available():
        built_for_cpu = torch.version.cuda is None
        reason = "this torch is a CPU build" if built_for_cpu else "torch finds no usable driver or device"
        return [Finding("gpu", False, f"{reason}; runs use the CPU")]
    properties = torch.cuda.get_device_properties(0)
    capability = torch.cuda.get_device_capability(0)
    told = f"compute capability {capability[0]}.{capability[1]}"
    memory = f"{properties.total_memory / 1e9:.0f} GB"
    return [
        Finding("gpu", True, f"{properties.name}, {memory}, {torch.cuda.device_count()} device(s), {told}"),
        Finding("bf16 rollouts", capability >= BF16_CAPABILITY, _at_least(BF16_CAPABILITY)),
        Finding("fp8 rollouts", capability >= FP8_CAPABILITY, _at_least(FP8_CAPABILITY)),
    ]


def _at_least(capability: tuple[int, int]) -> str:
    return f"from compute capability {capability[0]}.{capability[1]} on"


def _triton() -> Finding:
    if importlib.util.find_spec("triton") is None:
        return Finding("triton", False, "not installed; the torch references run instead")
    import triton

    if not torch.cuda.is_available():
        return Finding("triton", False, f"{triton.__version__}, but no GPU to run on")
    return Finding("triton", True, triton.__version__)


def _package(module: str, purpose: str, extra: Extra) -> Finding:
    if importlib.util.find_spec(module) is not None:
        return Finding(module, True, purpose)
    return Finding(module, False, f"{purpose}: {install_command(extra)} in your clone of Paceline")
