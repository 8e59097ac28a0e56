"""Compiles the kernels that share and pack a step's tokens for a GPU; prints how many registers each spills.

Compiling needs no GPU. Run by test_compiled.py.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "0"

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from paceline.kernels import allotment, packing, tree_walk  # noqa: E402

FLOATS = {
    "values_ptr",
    "priority_ptr",
    "temperature_ptr",
    "out_temperature_ptr",
    "logprobs_ptr",
    "out_logprobs_ptr",
}
NUMBERS = {"most", "reach", "num_proposals", "num_rows", "count", "shared", "queries"}


def spills(kernel, capability: int, warps: int, **constants) -> int:
    names = kernel.arg_names
    pdl = capability >= 90
    constants = {**constants, "PDL": pdl}
    kinds = {
        name: "i32"
        if name in NUMBERS
        else "*fp32"
        if name in FLOATS
        else "*i1"
        if name == "active_ptr"
        else "*i64"
        for name in names
    }
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else kinds[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    return compiled.asm["ptx"].count(".local ")


if __name__ == "__main__":
    capability = int(sys.argv[1])
    print(
        json.dumps(
            {
                "allotment": spills(allotment._allot_kernel, capability, 4, BLOCK_K=16, COMPARED_ROWS=16),
                "packing": spills(
                    packing._pack_kernel, capability, 1, TREE=True, BLOCK_Q=16, SUMMED_ROWS=256
                ),
                "walking": spills(tree_walk._walk_kernel, capability, 1, BLOCK_Q=16),
            }
        )
    )
