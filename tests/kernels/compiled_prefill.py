"""Compiles the fast mode's prefill attention for an H200; prints what each kernel takes and how it loads.

Compiling needs no GPU. Run by test_compiled.py.
"""

import json
import os
import re
import subprocess
import tempfile

os.environ["TRITON_INTERPRET"] = "0"

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from paceline.kernels import prefill_flat, triton_support  # noqa: E402

H200_SHARED = 232_448
KINDS = dict(
    k_scale_ptr="*fp32",
    v_scale_ptr="*fp32",
    table_ptr="*i32",
    cu_seqlens_ptr="*i64",
    context_ptr="*i64",
    num_sequences="i32",
    table_width="i32",
    span="i32",
    scale="fp32",
)


def figures(kernel, kinds: dict[str, str], options: dict, **constants) -> dict[str, int]:
    """Bytes of shared memory and of spills, products and loads by what carries them out."""
    names = kernel.arg_names
    kinds = KINDS | kinds
    constants |= dict(BLOCK_SIZE=16, PDL=options.pop("PDL"))
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else kinds[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {
            (names.index(name),): [["tt.divisibility", 16]]
            for name in names
            if name not in constants and kinds[name].startswith("*")
        },
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    layouts, ptx = compiled.asm["ttgir"], compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        said = subprocess.run(
            [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    return {
        "shared": compiled.metadata.shared,
        "spilled": sum(int(count) for count in re.findall(r"(\d+) bytes spill", said)),
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "asynchronous products": len(re.findall(r"warp_group_dot\b(?!_wait)", layouts)),
        "serialised": said.count("serialized"),
        "TMA loads": layouts.count("async_tma_copy_global_to_local"),
        "vector loads": len(re.findall(r"ld\.global\.v4", ptx)),
        "vector stores": len(re.findall(r"st\.global\.v4", ptx)),
    }


def flat(heads: tuple[int, int, int], gathered: bool, fp8: bool = False, dtype: str = "bf16") -> dict:
    num_heads, num_kv_heads, head_dim = heads
    tile = prefill_flat.FLAT_TILE
    source = f"tensordesc<{dtype}[{tile}, {head_dim}]>" if gathered else f"*{dtype}"
    kinds = dict(q_ptr=f"*{dtype}", out_ptr=f"*{dtype}", k_source=source, v_source=source)
    return figures(
        prefill_flat._flat_attention_kernel,
        kinds,
        prefill_flat.flat_options(head_dim, itemsize=2),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROWS=prefill_flat.QUERY_ROWS,
        PADDED_GQA=triton_support.next_power_of_2(num_heads // num_kv_heads),
        TILE=tile,
        GATHERED=gathered,
        FP8=fp8,
        **({} if fp8 else dict(k_scale_ptr=None, v_scale_ptr=None)),
    )


def gathering(cache: str, dtype: str) -> dict:
    kinds = dict(k_cache_ptr=f"*{cache}", v_cache_ptr=f"*{cache}", k_ptr=f"*{dtype}", v_ptr=f"*{dtype}")
    return figures(
        prefill_flat._gather_kernel,
        kinds,
        triton_support.launch_options(prefill_flat.GATHER_WARPS),
        NUM_KV_HEADS=8,
        HEAD_DIM=128,
        TOKENS=prefill_flat.GATHER_TOKENS,
        TILE=prefill_flat.FLAT_TILE,
    )


if __name__ == "__main__":
    triton_support.shared_memory = lambda device: H200_SHARED
    triton_support.has_dependent_launch = lambda device: True
    triton_support.torch.cuda.current_device = lambda: 0
    print(
        json.dumps(
            {
                "pointers": flat((32, 8, 128), gathered=False),
                "gathered": flat((32, 8, 128), gathered=True),
                "gathered, E4M3": flat((32, 8, 128), gathered=True, fp8=True),
                "gathered, E4M3, float16": flat((32, 8, 128), gathered=True, fp8=True, dtype="fp16"),
                "gathered, groups of 7": flat((28, 4, 128), gathered=True),
                "gathered, heads of 64": flat((14, 2, 64), gathered=True),
                "gathering": gathering("bf16", "bf16"),
                "gathering, E4M3": gathering("fp8e4nv", "bf16"),
                "gathering, E4M3, float16": gathering("fp8e4nv", "fp16"),
            }
        )
    )
