"""Peak rates of the current device: bytes moved and operations per second, measured with torch."""

import time
from dataclasses import dataclass

import torch

from benchmarks.kernels.case import KernelCase
from benchmarks.timing import time_call
from paceline.kernels.fp8_format import E4M3

COPIED_BYTES = {"cuda": 2_000_000_000, "cpu": 100_000_000}
# Rows, columns and depth of the product whose rate counts: large enough that more would not be faster.
PRODUCT_SIZE = {"cuda": 8192, "cpu": 512}
REPEATS = 5
# A GPU that was idle needs a moment until its clocks are up.
WARM_UP_SECONDS = {"cuda": 0.5, "cpu": 0.0}


@dataclass(frozen=True)
class DeviceLimits:
    """A device's highest rates."""

    bytes_per_second: float  # of reading, or of reading and writing together, whichever is faster
    flops: float  # per second, in the dtype of the benchmark
    fp8_flops: float | None  # None: the device has no FP8 arithmetic

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype, fp8: bool) -> "DeviceLimits":
        """Times a copy, a sum, a square product and, with `fp8`, the same product in FP8."""
        size = PRODUCT_SIZE[device.type]
        a = torch.randn(size, size, device=device).to(dtype)
        end = time.perf_counter() + WARM_UP_SECONDS[device.type]
        while time.perf_counter() < end:
            time_call(lambda: torch.mm(a, a.t()), device, 1)
        source = torch.ones(COPIED_BYTES[device.type] // 4, device=device)
        target = torch.empty_like(source)
        copy_seconds = time_call(lambda: target.copy_(source), device, REPEATS).low
        sum_seconds = time_call(lambda: source.sum(), device, REPEATS).low
        product_seconds = time_call(lambda: torch.mm(a, a.t()), device, REPEATS).low
        fp8_flops = None
        if fp8 and device.type == "cuda":
            narrow = a.to(E4M3)
            one = torch.ones((), device=device)
            multiply = lambda: torch._scaled_mm(narrow, narrow.t(), one, one, out_dtype=dtype)  # noqa: E731
            fp8_flops = 2 * size**3 / time_call(multiply, device, REPEATS).low
        return cls(
            bytes_per_second=max(2 * source.nbytes / copy_seconds, source.nbytes / sum_seconds),
            flops=2 * size**3 / product_seconds,
            fp8_flops=fp8_flops,
        )

    def seconds(self, case: KernelCase) -> float:
        """Returns the least that one launch of the case can take; 0 where the case names no limit."""
        flops = self.fp8_flops if case.fp8 and self.fp8_flops else self.flops
        return max(case.num_bytes / self.bytes_per_second, case.flops / flops)
