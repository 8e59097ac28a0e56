"""Where an update's time goes, from torch's profiler: each kernel counted to the part that launched it.

A kernel belongs to the innermost labelled range, or autograd function, it was launched in: the head's
function, what a backward pass recomputes, the optimiser. The others are classified by kind:
products, attention, and all that lies between. `host` is the GPU's idle time.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# Labels of ranges and names of autograd functions, with the part they mean; the first that matches counts.
RANGES = (
    ("HeadLogprobs", "head"),
    ("paceline::recompute", "recomputation"),
    ("paceline::optimiser", "optimiser"),
)
# Parts of kernels' names, with what they are.
ATTENTION_NAMES = ("flash", "fmha", "sdpa", "attention")
OPTIMISER_NAMES = ("adamw", "lpnorm")
PRODUCT_NAMES = ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas")
# Kernels that a profile names.
KERNELS_LISTED = 16


@dataclass(frozen=True)
class LearnParts:
    """Seconds of one update by part; all zero without a GPU."""

    products: float = 0.0
    attention: float = 0.0
    between: float = 0.0  # norms, RoPE, SwiGLU, residuals, embeddings, sums of gradients
    head: float = 0.0  # with the loss
    recomputation: float = 0.0
    optimiser: float = 0.0
    host: float = 0.0


@dataclass(frozen=True)
class LearnProfile:
    """An update's time by part, and by the kernels that took most of it."""

    parts: LearnParts = LearnParts()
    kernels: tuple[tuple[str, int, float], ...] = ()  # name, launches, seconds


def profile_update(update: Callable[[], object], device: torch.device) -> LearnProfile:
    """Profiles one update, which takes longer for it; on a CPU it is not made."""
    if device.type != "cuda":
        return LearnProfile()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        update()
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
    return attribute_kernels(profiler.events(), seconds)


def attribute_kernels(events: Iterable[Any], seconds: float) -> LearnProfile:
    """Adds up a profile's kernels by part and by name, for an update that took so many seconds.

    Kernels that the profiler links to no operation (Triton's, in a range of ours) are identified by name.
    """
    totals = dict.fromkeys(LearnParts.__dataclass_fields__, 0.0)
    launches: Counter[str] = Counter()
    times: Counter[str] = Counter()
    linked: Counter[str] = Counter()
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            launches[event.name] += 1
            times[event.name] += event.device_time_total / 1e6
        for kernel in event.kernels:
            spent = kernel.duration / 1e6
            totals[_part(event, kernel.name)] += spent
            linked[kernel.name] += spent
    for name, spent in times.items():
        totals[_part(None, name)] += max(0.0, spent - linked[name])
    totals["host"] = max(0.0, seconds - sum(totals.values()))
    largest = tuple((name, launches[name], spent) for name, spent in times.most_common(KERNELS_LISTED))
    return LearnProfile(LearnParts(**totals), largest)


def _part(event: Any, kernel: str) -> str:
    while event is not None:
        for label, part in RANGES:
            if label in event.name:
                return part
        event = event.cpu_parent
    name = kernel.lower()
    if any(known in name for known in OPTIMISER_NAMES):
        return "optimiser"
    if any(known in name for known in ATTENTION_NAMES):
        return "attention"
    return "products" if any(known in name for known in PRODUCT_NAMES) else "between"
