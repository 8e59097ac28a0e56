"""The device that a run computes on, what it supports, and how many threads each part of a step gets."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.config import Config, ConfigError
from paceline.types import Precision

# The lowest compute capabilities whose GPUs compute in these types, as our kernels do.
BF16_CAPABILITY = (8, 0)
FP8_CAPABILITY = (9, 0)


def best_device() -> torch.device:
    """Returns the current GPU if our kernels run on it, else the CPU."""
    usable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= BF16_CAPABILITY
    return torch.device("cuda" if usable else "cpu")


def prepare_device(config: Config) -> torch.device:
    """Returns the recipe's device and sets torch up for rollouts on it; raises where it cannot be used."""
    wanted = config.run.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "run.device = 'cuda': torch sees no GPU here; use run.device=cpu, "
            "and `paceline doctor` for the reason"
        )
    device = best_device() if wanted == "auto" else torch.device(wanted)
    if device.type == "cuda":
        refuse_old_gpu(config.rollout.precision, "rollout.precision")
        refuse_old_gpu(config.rollout.speculation.eagle_precision, "rollout.speculation.eagle_precision")
    prepare_torch(device)
    return device


def prepare_torch(device: torch.device) -> None:
    """Sets torch's process-wide switches for rollouts on this device."""
    torch.set_num_threads(1)  # a rollout's operations are too small to share; the learner asks for more
    if device.type == "cpu":
        # oneDNN packs the weight anew at every call, which costs more than it gains at a rollout's few rows.
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


def refuse_old_gpu(precision: str, key: str) -> None:
    """Raises where the current GPU computes neither in bf16 nor in the `precision` that `key` asked for."""
    precision = Precision(precision)
    capability = torch.cuda.get_device_capability()
    told = f"{torch.cuda.get_device_name()} (compute capability {capability[0]}.{capability[1]})"
    if capability < BF16_CAPABILITY:
        raise ConfigError(f"run.device = 'cuda': {told} does not compute in bf16; use run.device=cpu")
    if precision is not Precision.BASE and capability < FP8_CAPABILITY:
        raise ConfigError(
            f"{key} = {precision.value!r} needs Hopper or newer, this is {told}; use {Precision.BASE}"
        )


@contextmanager
def learning_threads(config: Config) -> Iterator[None]:
    """Lets torch use all cores within: learning's matrices are worth it, everything else runs on one."""
    torch.set_num_threads(config.run.threads or os.cpu_count() or 1)
    try:
        yield
    finally:
        torch.set_num_threads(1)
