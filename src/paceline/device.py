"""Which device a run computes on, what that device can do, and how many threads each part of a step gets."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.backend import BASE_PRECISION
from paceline.config import Config, ConfigError

BF16_CAPABILITY, FP8_CAPABILITY = (
    (8, 0),
    (9, 0),
)  # compute capabilities from which on a GPU computes in them, as our kernels do


def best_device() -> torch.device:
    usable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= BF16_CAPABILITY
    return torch.device("cuda" if usable else "cpu")


def prepare_device(config: Config) -> torch.device:
    wanted = config.run.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "run.device = 'cuda': torch sees no GPU here; use run.device=cpu, and `paceline doctor` for the reason"
        )
    device = (
        torch.device("cuda")
        if wanted == "cuda"
        else torch.device("cpu")
        if wanted == "cpu"
        else best_device()
    )
    if device.type == "cuda":
        refuse_old_gpu(config.rollout.precision, "rollout.precision")
    torch.set_num_threads(1)  # a rollout's operations are too small to share; the learner asks for more
    if device.type == "cpu":
        # oneDNN packs the weight anew at every call, which costs more than it gains at the few rows of a
        # rollout.
        torch.backends.mkldnn.enabled = False
    return device


def refuse_old_gpu(precision: str, key: str) -> None:
    """Where the GPU at hand cannot compute in bf16, or in the rollout's `precision`, which `key` asked
    for.
    """
    capability = torch.cuda.get_device_capability()
    told = f"{torch.cuda.get_device_name()} (compute capability {capability[0]}.{capability[1]})"
    if capability < BF16_CAPABILITY:
        raise ConfigError(f"run.device = 'cuda': {told} does not compute in bf16; use run.device=cpu")
    if precision != BASE_PRECISION and capability < FP8_CAPABILITY:
        raise ConfigError(
            f"{key} = {precision!r} needs Hopper or newer, this is {told}; use {BASE_PRECISION}"
        )


@contextmanager
def learning_threads(config: Config) -> Iterator[None]:
    """Learning's matrices are worth all cores; everything else runs on one."""
    torch.set_num_threads(config.run.threads or os.cpu_count() or 1)
    try:
        yield
    finally:
        torch.set_num_threads(1)
