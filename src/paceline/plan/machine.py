"""The GPU a run is planned for: this machine's, a known one by name, or a number of gigabytes."""

from dataclasses import dataclass

from paceline.config import ConfigError

# Memory in MiB as `nvidia-smi` lists it: the H200's was read there, the others are as published. torch
# reports 99.6% of an H200's.
GPUS = {
    "H200": 143771,
    "H100": 81559,
    "A100": 81920,
    "A100-40GB": 40960,
    "B200": 183359,
    "L40S": 46068,
    "RTX-4090": 24564,
}
SEEN_BY_TORCH = 0.995
# Beyond any GPU: a larger figure is a mistake.
MOST_GIGABYTES = 1e6
# Bytes of a process outside torch's allocator, measured on an H200: 0.55 GB before its first tensor, 0.31
# more once it has run.
CONTEXT_BYTES = 550_000_000
LIBRARY_BYTES = 350_000_000  # loaded kernels, cuBLAS


@dataclass(frozen=True)
class Machine:
    """A GPU and how much of its memory a run may use."""

    name: str
    total_bytes: int
    taken_bytes: int = (
        CONTEXT_BYTES + LIBRARY_BYTES
    )  # not for the run's tensors: the driver, libraries, other processes


def named_gpu(name: str) -> Machine:
    for known, mebibytes in GPUS.items():
        if known.lower() == name.lower():
            return Machine(known, int(mebibytes * 2**20 * SEEN_BY_TORCH))
    raise ConfigError(
        f"--gpu {name!r} is not known; known are {', '.join(GPUS)}; for others give --memory-gb"
    )


def gpu_of_size(gigabytes: float) -> Machine:
    if not 0 < gigabytes < MOST_GIGABYTES:
        raise ConfigError(f"--memory-gb {gigabytes:g} must be above 0 and below {MOST_GIGABYTES:g}")
    return Machine(f"{gigabytes:g} GB", int(gigabytes * 1e9))


def gpu_at_hand() -> Machine | None:
    """Returns this machine's GPU, or None; what other processes hold counts as taken."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return Machine(
        torch.cuda.get_device_name(), total, total - free - torch.cuda.memory_reserved() + LIBRARY_BYTES
    )
