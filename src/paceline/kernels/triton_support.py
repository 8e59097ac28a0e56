"""What every kernel file needs of Triton: an optional import, launch options, and dependent launch.

Triton is optional: without it the kernel definitions are inert and the torch references still run. On a
machine without a GPU the kernels are interpreted (`TRITON_INTERPRET=1`), which is how the CPU tests run them.

Programmatic dependent launch lets a kernel start while the one before it drains. Every kernel here begins
with `launch_next()`, but for those that write weights, and calls `wait_previous()` before it touches what the
kernels before it wrote:

    GEMM     |=== weights ===|
    norm            |.wait...|=|
    next GEMM           |.wait...|=== weights ===|

The wait returns when the previous kernel has finished and its writes are visible; since every program of
every kernel waits, the order is transitive. It costs nothing where dependent launch is off, and works inside
CUDA graphs.

Loaded before the wait, so that their latency is hidden: weights, and what a step knows before its first layer
(positions, cache slots, context lengths, block tables, seeds). The latter is safe because layers begin with
an embedding lookup, a plain launch: it starts when everything before it has finished, and nothing after it
starts before it has. Callers that write such tensors with kernels of this folder must put a plain launch
between those and their first use; what a plain launch itself writes is safe to load early one launch later.

`pull_to_l2` begins to fetch the first piece of a weight, so that the memory has something to do while the
small kernels between two products run. A little is best: long queues of it delay the small kernels
themselves.
"""

import functools
import os
import re
from types import SimpleNamespace

import torch

from paceline.kernels.operation import cdiv, next_power_of_2  # noqa: F401

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    import triton
    import triton.language as tl
    from triton.language.extra import cuda as tl_cuda
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    triton = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda k: k))
    tl = SimpleNamespace(constexpr=lambda value=None: value)
    tl_cuda = TensorDescriptor = None

TRITON_VERSION = tuple(
    int(number) for number in re.findall(r"\d+", getattr(triton, "__version__", "0.0"))[:2]
)
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
# Bytes of shared memory that the compiler takes beside tiles, for reductions and changes of layout.
OTHER_SHARED_BYTES = 2048
# Multiprocessors that the interpreter, which runs one program at a time, claims to have.
INTERPRETED_PROCESSORS = 8


@functools.cache
def has_dependent_launch(device_index: int = 0) -> bool:
    """Returns whether kernels can start while the one before drains (Hopper and newer)."""
    return not INTERPRETED and torch.cuda.get_device_capability(device_index)[0] >= 9


@functools.cache
def has_tma(device: torch.device) -> bool:
    """Returns whether whole tiles can be loaded by one instruction; the interpreter can."""
    return INTERPRETED or torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Returns the GPU's number of multiprocessors; for a CPU that of a small GPU."""
    if device.type == "cpu":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Returns the bytes that one program may have: 232,448 on an H200, 101,376 on most consumer GPUs."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def fitting_stages(wanted: int, stage_bytes: int, held_bytes: int, limit: int, in_registers: int = 0) -> int:
    """Returns how many tiles may be in flight within `limit` bytes of shared memory.

    `in_registers` of them need none of it. The number changes no bit.
    """
    return max(1, min(wanted, (limit - held_bytes - OTHER_SHARED_BYTES) // stage_bytes + in_registers))


def launch_options(
    num_warps: int,
    num_stages: int = 1,
    fuse_multiply_add: bool = False,
    stage_bytes: int = 0,
    held_bytes: int = 0,
) -> dict:
    """Returns the options of one launch.

    Without fused multiply-add the compiler cannot contract the same formula differently in two kernels, so
    equal formulas give equal bits; the kernels are bound by memory and do not miss it. `stage_bytes` are
    those of the tiles that are loaded together, `held_bytes` what else lies in shared memory.
    """
    if INTERPRETED:
        return dict(PDL=False)
    device = torch.cuda.current_device()
    pdl = has_dependent_launch(device)
    if stage_bytes:
        # Before Hopper, the tile that is being multiplied lies in registers.
        in_registers = 0 if pdl else 1
        num_stages = fitting_stages(
            num_stages, stage_bytes, held_bytes, shared_memory(torch.device("cuda", device)), in_registers
        )
    return dict(
        PDL=pdl,
        num_warps=num_warps,
        num_stages=num_stages,
        enable_fp_fusion=fuse_multiply_add,
        launch_pdl=pdl,
    )


@triton.jit
def launch_next(PDL: tl.constexpr):
    """Lets the next kernel start."""
    if PDL:
        tl_cuda.gdc_launch_dependents()


@triton.jit
def wait_previous(PDL: tl.constexpr):
    """Waits until the previous kernel has finished and its writes are visible."""
    if PDL:
        tl_cuda.gdc_wait()


@triton.jit
def pull_to_l2(address, num_bytes, PDL: tl.constexpr):
    """Begins to bring `num_bytes` from each int64 `address` into the L2 cache; both are multiples of 16."""
    if PDL:
        tl.inline_asm_elementwise(
            "{ .reg .pred any; setp.ne.s32 any, $2, 0;"
            " @any cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r",
            [address, num_bytes.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
