"""Launch options of the kernels that only learning runs, and where it runs them.

These kernels see thousands of rows at a time, so that dependent launch would gain nothing: they are plain
launches. On the meta device, where memory is planned, they allocate and launch nothing.
"""

import torch

from paceline.kernels.triton_support import INTERPRETED

# Programs that share the rows of a reduction over rows, for each multiprocessor.
PROGRAMS_PER_PROCESSOR = 4
# Multiprocessors that the meta device plans for: those of an H200.
META_PROCESSORS = 132


def takes_kernels(x: torch.Tensor) -> bool:
    """Returns whether learning runs kernels on such tensors: 16-bit ones on a GPU, or planned for one."""
    return (x.is_cuda or x.is_meta) and x.dtype in (torch.bfloat16, torch.float16)


def plain_options(num_warps: int) -> dict:
    return {} if INTERPRETED else dict(num_warps=num_warps, num_stages=1, enable_fp_fusion=True)


def reduction_programs(rows: int, device: torch.device) -> int:
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    else:
        processors = META_PROCESSORS if device.type == "meta" else 1
    return max(1, min(rows, PROGRAMS_PER_PROCESSOR * processors))
