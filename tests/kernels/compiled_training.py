"""Compiles the kernels of learning for a GPU of the given capability; prints the registers spilled by each.

Each is compiled twice, as a launch does it: an integer that is 1 becomes a constant, unless the kernel says
not to (`do_not_specialize`).

Run by test_compiled.py.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "0"

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from paceline.kernels import (  # noqa: E402
    adamw,
    adamw_8bit,
    draft_diagonal,
    logprob_rows,
    norm_training,
    rope_training,
    swiglu_training,
)

FP32 = {
    "partial_ptr", "rope_ptr", "logits_ptr", "temperatures_ptr", "logprobs_ptr", "entropies_ptr",
    "master_ptr", "first_ptr", "second_ptr", "scale_ptr", "first_scales_ptr", "second_scales_ptr",
    "prefix_lse_ptr", "lse_ptr", "d_k_ptr", "d_v_ptr",
}  # fmt: skip
FLOATS = {"epsilon", "step_size", "second_root", "first_share", "beta2", "second_share", "keep", "scale"}
HEADS = dict(NUM_HEADS=32, NUM_KV_HEADS=8, HEAD_DIM=128, HEADS=8, HALF=64)
OWN = dict(S=4, KV_HEADS=8, GROUP=4, HEAD_DIM=128, BLOCK_G=4, BLOCK_D=128)
CASES = {
    "norm backward": (
        norm_training._norm_backward_kernel,
        dict(K=2560, BLOCK_K=4096, ADD_TOTAL=True, WEIGHT=True),
        8,
    ),
    "rotation": (rope_training._rotate_kernel, dict(QK_NORM=True, **HEADS), 2),
    "rotation backward": (rope_training._rotate_backward_kernel, dict(QK_NORM=True, **HEADS), 2),
    "SwiGLU backward": (swiglu_training._silu_multiply_backward_kernel, dict(BLOCK=1024), 4),
    "a draft's own keys": (draft_diagonal._join_kernel, OWN, 1),
    "a draft's own keys, backward": (draft_diagonal._join_backward_kernel, OWN, 1),
    "logprobs": (logprob_rows._logprob_rows_kernel, dict(DIFFERENCE=True, BLOCK=4096), 8),
    "AdamW, 8 bits": (
        adamw_8bit._adamw_8bit_kernel,
        dict(HAS_GRADIENT=True, HAS_COPY=True, GROUPS=16),
        4,
    ),
    "AdamW": (adamw._adamw_kernel, dict(HAS_GRADIENT=True, HAS_COPY=True, BLOCK=2048), 4),
}


def kind(name: str) -> str:
    if name == "targets_ptr":
        return "*i64"
    if name.endswith("_ptr"):
        return "*fp32" if name in FP32 else "*bf16"
    return "fp32" if name in FLOATS else "i32"


def ones(kernel) -> dict[str, int]:
    """The arguments that a launch makes constants when they are 1."""
    return {p.name: 1 for p in kernel.params if kind(p.name) == "i32" and not p.do_not_specialize}


def compiled(kernel, constants: dict, warps: int, capability: int):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kind(name) for name in names}
    if "first_scales_ptr" in names:  # moments of eight bits
        signature |= {"first_ptr": "*fp8e4nv", "second_ptr": "*fp8e4nv"}
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")
    }
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


if __name__ == "__main__":
    capability = int(sys.argv[1])
    spilled = {}
    for name, (kernel, constants, warps) in CASES.items():
        for label, all_constants in (("", constants), (", ones", ones(kernel) | constants)):
            ptx = compiled(kernel, all_constants, warps, capability).asm["ptx"]
            spilled[name + label] = ptx.count(".local")
    print(json.dumps(spilled))
