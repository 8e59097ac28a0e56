"""Compiles attention over an E4M3 cache for Hopper and prints how each of its products runs.

Compiling needs no GPU. Run by test_compiled.py.
"""

import json
import os
import re

os.environ["TRITON_INTERPRET"] = "0"

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from paceline.kernels.attention_tiles import GROUP, TILE  # noqa: E402
from paceline.kernels.paged_kernel import paged_attention_kernel  # noqa: E402
from paceline.kernels.paged_launch import Launch  # noqa: E402
from paceline.kernels.prefill_attention import (  # noqa: E402
    FP8_QUERY_ROWS,
    FP8_WARPS,
    _prefill_attention_kernel,
)

POINTERS = dict(
    q_ptr="*bf16",
    k_cache_ptr="*fp8e4nv",
    v_cache_ptr="*i16",
    k_scale_ptr="*fp32",
    v_scale_ptr="*fp32",
    table_ptr="*i32",
    cu_seqlens_ptr="*i32",
    context_ptr="*i32",
    depth_ptr="*i64",
    node_slots_ptr="*i64",
    out_ptr="*bf16",
)


def products(kernel, rows: int, head_dim: int, tree: bool = False, **options) -> list[str]:
    """One entry per product of the loop: the widths of its operands, or that it runs asynchronously."""
    constants = dict(
        NUM_HEADS=32,
        NUM_KV_HEADS=8,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=16,
        ROWS=rows,
        PADDED_GQA=4,
        TILE=TILE,
        GROUP=GROUP,
        FP8=True,
        PDL=True,
        SHARED=False,
        FAR=False,
        NEAR=False,
        TREE=tree,
        QUANTISE=False,
        values_ptr=None,
        scales_ptr=None,
        acc_ptr=None,
        maximum_ptr=None,
        total_ptr=None,
    )
    if not tree:
        constants |= dict(depth_ptr=None, node_slots_ptr=None)
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    types = {
        name: POINTERS.get(name, "fp32" if name == "scale" else "i32")
        for name in names
        if name not in constants
    }
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in types.items()
        if kind.startswith("*")
    }
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    lines = (
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"].splitlines()
    )
    found = []
    for line in lines:
        if re.search(r"warp_group_dot\b(?!_wait)", line):
            found.append("asynchronous")
        elif "tt.dot " in line:
            found.append("widths " + " ".join(re.findall(r"kWidth = (\d+)", line)))
    return found


if __name__ == "__main__":
    results = {}
    for head_dim in (64, 128):
        for rows in (8, 16):
            warps = Launch(1, stages=3).num_warps(rows, fp8=True)
            for name, tree in (("decoding", False), ("tree", True)):
                results[f"{name}, {rows} rows, {head_dim}"] = products(
                    paged_attention_kernel, rows, head_dim, tree, num_warps=warps, num_stages=3
                )
        results[f"prefill, {head_dim}"] = products(
            _prefill_attention_kernel, FP8_QUERY_ROWS, head_dim, num_warps=FP8_WARPS, num_stages=3
        )
    print(json.dumps(results))
