"""Where an update's time goes, from torch's profiler: each kernel counted to the part that launched it.

A kernel belongs to the innermost labelled range, or autograd function, it was launched in: the head's
function, what is made again in a backward pass, the optimiser. The others are told apart by what they are:
products, attention, and all that lies between. `host` is the time in which the GPU had nothing to do.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

# Labels of ranges and names of autograd functions, with the part they mean; the first that matches counts.
RANGES = (
    ("HeadLogprobs", "head"),
    ("paceline::recompute", "recomputation"),
    ("paceline::optimiser", "optimiser"),
)
# Parts of kernels' names, with what they are.
ATTENTION_NAMES = ("flash", "fmha", "sdpa", "attention")
PRODUCT_NAMES = ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas")


@dataclass(frozen=True)
class LearnParts:
    """Seconds of one update by part; all zero where there is no GPU to tell them apart on."""

    products: float = 0.0
    attention: float = 0.0
    between: float = 0.0  # norms, RoPE, SwiGLU, residuals, embeddings, sums of gradients
    head: float = 0.0  # with the loss
    recomputation: float = 0.0
    optimiser: float = 0.0
    host: float = 0.0


def profile_parts(update: Callable[[], object], device: torch.device) -> LearnParts:
    """Profiles one update, which takes longer for it; on a CPU it is not made."""
    if device.type != "cuda":
        return LearnParts()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        update()
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
    totals = dict.fromkeys(LearnParts.__dataclass_fields__, 0.0)
    for event in profiler.events():
        for kernel in event.kernels:
            totals[_part(event, kernel.name)] += kernel.duration / 1e6
    totals["host"] = max(0.0, seconds - sum(totals.values()))
    return LearnParts(**totals)


def _part(event: object, kernel: str) -> str:
    while event is not None:
        for label, part in RANGES:
            if label in event.name:
                return part
        event = event.cpu_parent
    name = kernel.lower()
    if any(known in name for known in ATTENTION_NAMES):
        return "attention"
    return "products" if any(known in name for known in PRODUCT_NAMES) else "between"
