"""Compiles the kernels with the largest tiles for a GPU of the given capability and shared memory.

Prints what each takes of it, how many stages it was meant to have and how many it has. Run by
test_compiled.py.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "0"

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from paceline.kernels import (  # noqa: E402
    linear,
    moe,
    paged_kernel,
    paged_launch,
    prefill_attention,
    triton_support,
)
from paceline.kernels.attention_tiles import GROUP, TILE  # noqa: E402

HEADS = dict(
    NUM_HEADS=32,
    NUM_KV_HEADS=8,
    HEAD_DIM=128,
    BLOCK_SIZE=16,
    PADDED_GQA=4,
    TILE=TILE,
    GROUP=GROUP,
    FAR=False,
    NEAR=False,
    TREE=False,
    FP8=False,
    QUANTISE=False,
)
BF16 = {"x_ptr", "weight_ptr", "q_ptr", "k_cache_ptr", "v_cache_ptr", "out_ptr"}
FP32 = {"acc_ptr", "maximum_ptr", "total_ptr"}


def shared_bytes(kernel, capability: int, constants: dict, options: dict) -> int:
    names = kernel.arg_names
    constants = {name: value for name, value in (constants | options).items() if name in names} | {
        "PDL": False
    }
    for name in (
        "k_scale_ptr",
        "v_scale_ptr",
        "values_ptr",
        "scales_ptr",
        "depth_ptr",
        "node_slots_ptr",
        *(() if constants.get("SHARED") or constants.get("FAR") else FP32),
    ):
        if name in names:
            constants[name] = None
    kinds = {
        name: "*bf16"
        if name in BF16
        else "*fp32"
        if name in FP32
        else "*i32"
        if name.endswith("_ptr")
        else "i32"
        for name in names
    }
    kinds["scale"] = "fp32"
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else kinds[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in names
            if name.endswith("_ptr") and name not in constants
        },
    )
    compiling = {name: options[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=compiling).metadata.shared


def cases():
    """(name, kernel, constants, stages that were meant, options of the launch), all for 16-bit numbers."""
    for rows, width in (
        (1, 4096),
        (1, 24576),
        (32, 4096),
        (64, 24576),
        (128, 4096),
        (128, 24576),
        (256, 4096),
        (2048, 24576),
    ):
        tile = linear.choose_tile(rows, width)
        constants = dict(K=4096, ROWS=tile.rows, COLS=tile.cols, DEPTH=tile.depth, PULL=512)
        yield (
            f"linear, {rows} x {width}",
            linear._stream_kernel,
            constants,
            tile.stages,
            tile.options(itemsize=2),
        )
    for slots in (64, 4096, 65536):
        tile = moe.choose_expert_tile(slots, 128)
        constants = dict(K=2048, SLOTS_PER_ROW=8, ROWS=tile.rows, COLS=tile.cols, DEPTH=tile.depth)
        yield f"experts, {slots}", moe._expert_linear_kernel, constants, tile.stages, tile.options(itemsize=2)
    for tiles, rows in ((8, 8), (8, 64), (512, 8), (4096, 16)):
        launch = paged_launch.default_launch(processors=132, tiles=tiles, max_groups=64)
        constants = HEADS | dict(ROWS=rows, SHARED=launch.programs > 1)
        options = launch.options(rows, head_dim=128, q_bytes=2, kv_bytes=2)
        yield (
            f"decoding, {tiles} tiles of {rows} rows",
            paged_kernel.paged_attention_kernel,
            constants,
            launch.stages,
            options,
        )
    for name, rows, launch in (
        ("together", paged_launch.FAR_ROWS, paged_launch.far_launch(processors=132, tiles=8, max_groups=64)),
        ("alone", paged_launch.FOLDED_FAR_ROWS, paged_launch.folding_far_launch(processors=132, tiles=128)),
    ):
        yield (
            f"what a tree's nodes share, {name}",
            paged_kernel.paged_attention_kernel,
            HEADS | dict(ROWS=rows, SHARED=launch.programs > 1, FAR=True),
            launch.stages,
            launch.options(rows, head_dim=128, q_bytes=2, kv_bytes=2),
        )
    rows = prefill_attention.QUERY_ROWS
    stages = prefill_attention.STAGES
    warps = prefill_attention.WARPS
    for head_dim in (128, 256):
        options = triton_support.launch_options(
            warps, stages, stage_bytes=2 * TILE * head_dim * 2, held_bytes=rows * head_dim * 2
        )
        constants = HEADS | dict(ROWS=rows, HEAD_DIM=head_dim)
        yield (
            f"prefill, heads of {head_dim}",
            prefill_attention._prefill_attention_kernel,
            constants,
            stages,
            options,
        )


# The largest tiles of each kernel: what the core suite compiles. Compiling all of them takes a minute.
LARGEST = (
    "linear, 32 x 4096",
    "linear, 2048 x 24576",
    "experts, 65536",
    "decoding, 8 tiles of 64 rows",
    "decoding, 512 tiles of 8 rows",
    "prefill, heads of 128",
    "prefill, heads of 256",
)


def main(capability: int, limit: int, which: str) -> None:
    triton_support.shared_memory = lambda device: limit
    triton_support.has_dependent_launch = lambda device: capability >= 90
    triton_support.torch.cuda.current_device = lambda: 0
    print(
        json.dumps(
            {
                name: [shared_bytes(kernel, capability, constants, options), meant, options["num_stages"]]
                for name, kernel, constants, meant, options in cases()
                if which == "all" or name in LARGEST
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
