"""Compiles the kernels of rejection for a GPU; prints how many registers each spills.

Compiling needs no GPU. Run by test_compiled.py.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "0"

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from paceline.kernels import rejection_kernel as kernels  # noqa: E402
from paceline.kernels.sampler import CHUNK  # noqa: E402

INTEGERS = {"seed_ptr", "position_ptr", "proposals_ptr", "slots_ptr", "token_ptr"}
SMALL_INTEGERS = {"best_ptr", "accepted_ptr", "left_ptr"}
# Warps of each kernel, as it is launched.
WARPS = {
    "mass_kernel": 8,
    "accept_kernel": 1,
    "draw_kernel": 8,
    "settle_kernel": 1,
    "distribution_kernel": 8,
}


def kind(name: str) -> str:
    """Returns the type of a kernel's argument."""
    if not name.endswith("_ptr"):
        return "i32"
    if name == "logits_ptr":
        return "*bf16"
    return "*i64" if name in INTEGERS else "*i32" if name in SMALL_INTEGERS else "*fp32"


def spills(kernel, capability: int, warps: int, known: bool) -> int:
    names = kernel.arg_names
    constants = {"KNOWN": known, "CHUNK": CHUNK, "BLOCK": 128, "BLOCK_K": 8, "PDL": capability >= 90}
    constants = {name: value for name, value in constants.items() if name in names}
    if not known and "draft_ptr" in names:
        constants["draft_ptr"] = None
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else kind(name) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": warps, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return compiled.asm["ptx"].count(".local ")


if __name__ == "__main__":
    capability = int(sys.argv[1])
    found = {
        f"{name}, {'probabilities' if known else 'certain'}": spills(
            getattr(kernels, name), capability, warps, known
        )
        for name, warps in WARPS.items()
        for known in ((True, False) if name in ("accept_kernel", "draw_kernel") else (True,))
    }
    print(json.dumps(found))
