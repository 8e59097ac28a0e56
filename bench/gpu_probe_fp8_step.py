"""Whole decode steps at fp8+kv with one thing changed at a time: milliseconds, Qwen3-8B shape, random
weights.

PYTHONPATH=src:bench python3 bench/gpu_probe_fp8_step.py [BATCHES [NEW_TOKENS]]     steps
PYTHONPATH=src:bench python3 bench/gpu_probe_fp8_step.py kernels [MODEL]            what each kernel of a step takes, by the profiler
"""

import sys
from contextlib import ExitStack
from unittest.mock import patch

import torch

from paceline.bench.decode import bench_decode
from paceline.bench.setup import bench_policy
from paceline.kernels import fp8_linear as products
from paceline.kernels.fp8_linear import choose_parts
from paceline.kernels.fp8_quantise import quantise_rows
from paceline.kernels.paged_attention import paged_attention
from paceline.kernels.paged_launch import Launch

KERNELS = sys.argv[1:2] == ["kernels"]
BATCHES = [
    int(b) for b in (sys.argv[1] if len(sys.argv) > 1 and not KERNELS else "1,32,64,128,256").split(",")
]
MODEL = sys.argv[2] if KERNELS and len(sys.argv) > 2 else "qwen3-8b"
NEW = int(sys.argv[2]) if len(sys.argv) > 2 and not KERNELS else 96
FORWARD, ATTENTION = "paceline.paged.forward", "paceline.kernels.paged_attention"


def parts(qkv: int, output: int, down: int):
    """`choose_parts` for the three narrow weights; the wide one stays whole."""
    return (
        lambda width, depth: 1 if width > 8192 else qkv if width > 4096 else output if depth <= 4096 else down
    )


def unfused(q_RQHD, *rest):
    return quantise_rows(paged_attention(q_RQHD, *rest).flatten(0, 1).flatten(1))


def stages(count: int, registers: int | None = None, warps: int | None = None):
    def launch(processors: int, tiles: int, max_groups: int) -> Launch:
        return (
            Launch(min(max_groups, 4 * processors // tiles), 3)
            if tiles <= processors
            else Launch(1, count, registers, warps)
        )

    return launch


VARIANTS = {
    "as it is": {},
    "attention does not quantise": {f"{FORWARD}.paged_attention_quantised": unfused},
    "parts 1 2 2": {"paceline.kernels.fp8_linear.choose_parts": parts(1, 2, 2)},
    "parts 2 2 2": {"paceline.kernels.fp8_linear.choose_parts": parts(2, 2, 2)},
    "parts 1 1 1": {"paceline.kernels.fp8_linear.choose_parts": parts(1, 1, 1)},
    "cuBLAS from 97": {"paceline.kernels.fp8_linear.CUBLAS_ROWS": 97},
    "cuBLAS never": {"paceline.kernels.fp8_linear.CUBLAS_ROWS": 1 << 30},
    "attention in 2 stages": {f"{ATTENTION}.default_launch": stages(2)},
    "attention in 5 stages": {f"{ATTENTION}.default_launch": stages(5)},
    "in 3, 128 registers": {f"{ATTENTION}.default_launch": stages(3, 128)},
    "in 3, 2 warps": {f"{ATTENTION}.default_launch": stages(3, warps=2)},
    "in 2, 2 warps": {f"{ATTENTION}.default_launch": stages(2, warps=2)},
}


def kernels(policy, precision: str) -> None:
    """Mean microseconds and launches per step of each kernel; overlapped launches count in full, so sums
    exceed a step's time.
    """
    for batch in (1, 64, 128):
        bench_decode(policy, [batch], 128, 32, 1, False, precision=precision)  # compiles
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            bench_decode(policy, [batch], 128, 32, 1, False, precision=precision)
        steps = (
            2 * 32
        )  # of the first run and the repeat; the short run and prefill stand apart by name or by being few
        rows = sorted(
            ((e.key, e.count / steps, e.self_device_time_total / steps) for e in profiler.key_averages()),
            key=lambda row: -row[2],
        )
        print(
            f"{precision}, batch {batch}: "
            + "; ".join(f"{key[:40]} {us:.0f} us / {count:.0f}" for key, count, us in rows[:14]),
            flush=True,
        )


def main() -> None:
    assert products.choose_parts is choose_parts
    policy = bench_policy(MODEL, torch.device("cuda"))
    if KERNELS:
        for precision in (
            ("bf16", "fp8+kv") if MODEL == "qwen3-8b" else ("fp8",)
        ):  # other shapes may not have room for both
            kernels(policy, precision)
        return
    print(f"{'variant':>30} " + " ".join(f"{batch:>8}" for batch in BATCHES), flush=True)
    for precision in ("bf16", "fp8"):
        points = bench_decode(policy, BATCHES, 128, NEW, 1, False, precision=precision)
        print(f"{precision:>30} " + " ".join(f"{p.step_ms.median:>8.3f}" for p in points), flush=True)
    for name, changes in VARIANTS.items():
        with ExitStack() as stack:
            for target, value in changes.items():
                stack.enter_context(patch(target, value))
            points = bench_decode(policy, BATCHES, 128, NEW, 1, False, precision="fp8+kv")
        print(f"{name:>30} " + " ".join(f"{p.step_ms.median:>8.3f}" for p in points), flush=True)


if __name__ == "__main__":
    main()
