"""Runs the cases of a kernel benchmark: first whether the result is right, then how long it takes."""

from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.kernels.attention import attention_cases, fp8_attention_cases, prefill_cases
from benchmarks.kernels.case import KernelCase, KernelPoint
from benchmarks.kernels.experts import experts_cases, fp8_experts_cases
from benchmarks.kernels.history import history_cases
from benchmarks.kernels.limits import DeviceLimits
from benchmarks.kernels.products import fp8_linear_cases, linear_cases, quantise_cases
from benchmarks.kernels.sampler import sampler_cases
from benchmarks.kernels.workload import Operands
from benchmarks.timing import time_call
from paceline.bench.spread import Spread
from paceline.device import FP8_CAPABILITY
from paceline.policy.config import DecoderConfig

CASES: dict[str, Callable[[Operands], Iterator[KernelCase]]] = {
    "linear": linear_cases,
    "fp8-linear": fp8_linear_cases,
    "quantise": quantise_cases,
    "attention": attention_cases,
    "fp8-attention": fp8_attention_cases,
    "prefill": prefill_cases,
    "sampler": sampler_cases,
    "experts": experts_cases,
    "fp8-experts": fp8_experts_cases,
    "history": history_cases,
}
FP8_KERNELS = ("fp8-linear", "quantise", "fp8-attention", "fp8-experts")
EXPERT_KERNELS = ("experts", "fp8-experts")


def choose_kernels(only: Sequence[str], shape: DecoderConfig, device: torch.device) -> list[str]:
    """Returns the kernels to measure: the requested ones, or all that model and device have."""
    unknown = [name for name in only if name not in CASES]
    if unknown:
        raise ValueError(f"--only {unknown[0]!r}: must be of {', '.join(CASES)}, with commas between")
    reasons = {name: _reason_against(name, shape, device) for name in only or CASES}
    refused = [name for name in only if reasons[name]]
    if refused:
        raise ValueError(f"--only {refused[0]!r}: {reasons[refused[0]]}")
    return [name for name, reason in reasons.items() if not reason]


def _reason_against(name: str, shape: DecoderConfig, device: torch.device) -> str:
    if name in EXPERT_KERNELS and not shape.num_experts:
        return "this model has no experts; use one that has, such as --model qwen3-30b-a3b"
    if name in FP8_KERNELS and not _computes_fp8(device):
        return f"{torch.cuda.get_device_name()} does not compute in FP8: that takes Hopper or newer"
    return ""


def _computes_fp8(device: torch.device) -> bool:
    """Whether the FP8 kernels run: on a CPU their references do."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def measure_limits(device: torch.device, shape: DecoderConfig) -> DeviceLimits:
    """Returns the rates that the points of `bench_kernels` are compared with."""
    return DeviceLimits.measure(device, Operands.on(device, shape).dtype, _computes_fp8(device))


@torch.inference_mode()
def bench_kernels(
    shape: DecoderConfig, device: torch.device, kernels: Sequence[str], limits: DeviceLimits, repeats: int
) -> Iterator[KernelPoint]:
    """Yields point by point, kernel by kernel; one case's tensors are gone before the next kernel's."""
    operands = Operands.on(device, shape)
    for name in kernels:
        torch.manual_seed(0)
        for case in CASES[name](operands):
            yield _measure(case, device, limits, repeats)


def _measure(case: KernelCase, device: torch.device, limits: DeviceLimits, repeats: int) -> KernelPoint:
    error = case.error()
    correct = error <= case.tolerance
    own = torchs = None
    if correct:
        own = _launch_microseconds(case.run, case, device, repeats)
        if case.run_torch is not None:
            torchs = _launch_microseconds(case.run_torch, case, device, repeats)
    limit = limits.seconds(case) * 1e6 or None
    return KernelPoint(case.kernel, case.size, error, correct, own, torchs, limit)


def _launch_microseconds(
    run: Callable[[], object], case: KernelCase, device: torch.device, repeats: int
) -> Spread:
    seconds = time_call(run, device, repeats)
    scale = 1e6 / case.copies
    return Spread(seconds.median * scale, seconds.low * scale, seconds.high * scale)
