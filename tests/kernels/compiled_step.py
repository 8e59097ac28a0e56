"""Compiles the kernels that grow and walk trees for a GPU; prints registers that each spills.

Compiling needs no GPU. Run by test_compiled.py.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "0"

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from paceline.kernels import (  # noqa: E402
    candidates,
    tree_choice,
    tree_counts,
    tree_growth,
    tree_walk,
)

FLOATS = {
    "logits_ptr",
    "score_ptr",
    "values_ptr",
    "temperature_ptr",
    "logprobs_ptr",
    "out_logprobs_ptr",
    "scores_ptr",
    "log_rates_ptr",
    "last_values_ptr",
    "found_values_ptr",
    "next_values_ptr",
    "prior_ptr",
    "tried_ptr",
    "right_ptr",
    "fresh_ptr",
    "rates_ptr",
}
NUMBERS = {
    *("num_proposals", "num_rows", "count", "queries"),
    *("num_found", "first", "used", "num_candidates", "num_queries", "num_cells"),
    *("depth", "width", "next_width", "vocab_size", "num_chunks"),
}
LEVEL = dict(LEAVES=False, COUNT=4, BLOCK_N=16, BLOCK_D=8)


def spills(kernel, capability: int, warps: int, **constants) -> int:
    names = kernel.arg_names
    pdl = capability >= 90
    constants = {**constants, "PDL": pdl}
    kinds = {name: "i32" if name in NUMBERS else "*fp32" if name in FLOATS else "*i64" for name in names}
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
                "walking": spills(tree_walk._walk_kernel, capability, 1, BLOCK_Q=16),
                "candidates of some tokens": spills(
                    candidates._best_chunk_kernel, capability, 8, COUNT=4, CHUNK=2048, SOME=True
                ),
                "growing": spills(tree_growth._grow_kernel, capability, 1, ROOTS=False, **LEVEL),
                "growing from roots": spills(tree_growth._grow_kernel, capability, 1, ROOTS=True, **LEVEL),
                "choosing": spills(tree_choice._choose_kernel, capability, 4, BLOCK_N=64, BLOCK_K=16),
                "counting": spills(tree_counts._count_kernel, capability, 1, BLOCK_Q=16),
                "fading": spills(tree_counts._fade_kernel, capability, 1, BLOCK_C=64),
                "rates": spills(tree_counts._log_rates_kernel, capability, 1, BLOCK_C=64),
            }
        )
    )
