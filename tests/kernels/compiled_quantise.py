"""Compiles the kernels that quantise weights for an H200; prints how each loads and stores, and its spills.

Compiling needs no GPU. Run by test_compiled.py.
"""

import json
import os
import re

os.environ["TRITON_INTERPRET"] = "0"

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from paceline.kernels import fp8_quantise, fp8_quantise_many  # noqa: E402

NUMBERS = {"N": "i32", "K": "i32", "PADDED_K": "i32"}
ONE = NUMBERS | {"weight_ptr": "*bf16", "values_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}
TABLES = NUMBERS | {f"{table}_ptr": "*i64" for table in ("rows", "copies", "values", "scales")}
OPTIONS = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": False}


def figures(kernel, kinds: dict[str, str], **constants) -> dict[str, int]:
    names = kernel.arg_names
    constants = {"PDL": True, "COPY": False, "ALIGNED": True} | constants
    constants = {name: value for name, value in constants.items() if name in names}
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else kinds[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in kinds},
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS).asm["ptx"]
    return {
        "vector loads": len(re.findall(r"ld\.global\.v4", ptx)),
        "vector stores": len(re.findall(r"st\.global\.v4", ptx)),
        "spilled": ptx.count(".local "),
    }


if __name__ == "__main__":
    many = fp8_quantise_many._quantise_many_kernel
    print(
        json.dumps(
            {
                "one": figures(fp8_quantise._quantise_blocks_kernel, ONE),
                "many": figures(many, TABLES, DTYPE=tl.bfloat16),
                "many, float32": figures(many, TABLES, DTYPE=tl.float32),
                "many, copied": figures(many, TABLES, DTYPE=tl.bfloat16, COPY=True),
                "many, not aligned": figures(many, TABLES, DTYPE=tl.bfloat16, ALIGNED=False),
            }
        )
    )
