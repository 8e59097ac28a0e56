"""Compiles what operations launch for a GPU that is not there, and prints what the kernels take as JSON.

    python -m tests.kernels.compiled CASES CAPABILITY SHARED_MEMORY

Compiling needs no GPU. Run by test_compiled.py, in a process of its own because the tests' kernels are
interpreted.
"""

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "0"

import torch  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

import paceline.kernels  # noqa: E402
from paceline.kernels import (  # noqa: E402
    adamw,
    adamw_8bit,
    candidates,
    draft_diagonal,
    linear,
    logprob_rows,
    moe,
    norm_training,
    paged_attention,
    prefill_attention,
    prefill_flat,
    rope_training,
    swiglu_training,
    tree_choice,
    tree_counts,
    tree_growth,
    tree_walk,
    triton_support,
)
from paceline.kernels.fp8_format import E4M3  # noqa: E402
from paceline.kernels.paged_launch import Launch  # noqa: E402
from paceline.kernels.row_step import Queries, TreeKeys  # noqa: E402

BF16 = torch.bfloat16
# What was launched since it was last cleared: (name of the kernel, what was compiled, stages it was to have).
launched: list[tuple] = []


def pretend(capability: int, shared: int) -> None:
    """From here on launches compile, for such a GPU."""
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )
    torch.cuda.current_device = lambda: 0
    for found in pkgutil.iter_modules(paceline.kernels.__path__):
        module = importlib.import_module(f"paceline.kernels.{found.name}")
        for name, value in (
            ("has_dependent_launch", capability >= 90),
            ("has_tma", capability >= 90),
            ("multiprocessors", 132),
            ("shared_memory", shared),
        ):
            if hasattr(module, name):
                setattr(module, name, lambda device, value=value: value)
    wanted = []
    fitting = triton_support.fitting_stages

    def fitting_stages(stages, *sizes):
        wanted.append(stages)
        return fitting(stages, *sizes)

    triton_support.fitting_stages = fitting_stages
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        launched.append((self.fn.__name__, compiled, wanted.pop() if wanted else None))

    JITFunction.run = compile_only


def kernels_of(function, *args, **options) -> list[tuple]:
    launched.clear()
    function(*args, **options)
    return list(launched)


def empty(*shape: int, dtype=BF16, device="cpu") -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def floats(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


# -- attention's inputs --------------------------------------------------------------------------------------


def paged(rows: int, queries: int, keys: int, head_dim: int = 128, cache=BF16, tree: bool = False, **options):
    """Launches attention of 32 heads over 8; no memory is touched."""
    k, v = (empty(64, 16, 8, head_dim, dtype=cache, device="meta") for _ in range(2))
    scales = [empty(8, dtype=torch.float32, device="meta") if cache == E4M3 else None] * 2
    q = empty(rows, queries, 32, head_dim, device="meta")
    table = empty(rows, keys // 16, dtype=torch.int32, device="meta")
    depth = empty(rows, queries, dtype=torch.int64, device="meta")
    nodes = TreeKeys(depth, empty(rows, queries, queries, dtype=torch.int64, device="meta")) if tree else None
    context = empty(rows, dtype=torch.int64, device="meta")
    paged_attention.paged_attention_triton(q, k, v, table, context, *scales, nodes, **options)


def prefilled(run, heads=(32, 8, 128), cache=BF16, dtype=BF16, **options):
    """Launches a chunk of 512 tokens."""
    num_heads, num_kv_heads, head_dim = heads
    k, v = (empty(64, 16, num_kv_heads, head_dim, dtype=cache, device="meta") for _ in range(2))
    scales = [empty(num_kv_heads, dtype=torch.float32, device="meta") if cache == E4M3 else None] * 2
    q = empty(512, num_heads, head_dim, dtype=dtype, device="meta")
    table = empty(1, 64, dtype=torch.int32, device="meta")
    starts = empty(2, dtype=torch.int64, device="meta")
    run(q, k, v, table, starts, starts[:1], k_scale_H=scales[0], v_scale_H=scales[1], **options)


# -- cases ---------------------------------------------------------------------------------------------------


def sizes() -> dict:
    """Bytes of shared memory, stages that were meant, and stages that fit, where tiles are pipelined."""
    cases = {}
    for rows, width in ((1, 4096), (32, 4096), (64, 24576), (128, 24576), (2048, 24576)):
        x, weight = empty(rows, 4096, device="meta"), empty(width, 4096, device="meta")
        cases[f"linear, {rows} x {width}"] = lambda x=x, weight=weight: linear.linear_triton(x, weight)
    for slots in (64, 4096, 65536):

        def experts(slots=slots):
            tile = moe.choose_expert_tile(slots, 128)
            tiles = moe.sort_by_expert_triton(empty(slots // 8, 8, dtype=torch.int32), 128, tile.rows)
            x, weight = empty(slots // 8, 2048, device="meta"), empty(128, 1536, 2048, device="meta")
            moe.expert_linear_triton(x, weight, tiles, tile)

        cases[f"experts, {slots}"] = experts
    for rows, queries, tree in ((1, 1, False), (1, 16, False), (64, 1, False), (512, 4, False)):
        cases[f"decoding {rows} x {queries}"] = lambda r=rows, q=queries, t=tree: paged(r, q, 16384, tree=t)
    for rows in (1, 64):
        cases[f"trees of {rows}"] = lambda rows=rows: paged(rows, 16, 16384, tree=True)
    for head_dim in (128, 256):
        cases[f"prefill, heads of {head_dim}"] = lambda dim=head_dim: prefilled(
            prefill_attention.prefill_attention_triton, (32, 8, dim)
        )
    return {
        f"{name}: {kernel}": [compiled.metadata.shared, wanted, compiled.metadata.num_stages]
        for name, run in cases.items()
        for kernel, compiled, wanted in kernels_of(run)
        if wanted is not None
    }


def attention() -> dict:
    """Each product of a loop over an E4M3 cache: the widths of its operands, or that it is asynchronous."""

    def products(compiled) -> list[str]:
        found = []
        for line in compiled.asm["ttgir"].splitlines():
            if re.search(r"warp_group_dot\b(?!_wait)", line):
                found.append("asynchronous")
            elif "tt.dot " in line:
                found.append("widths " + " ".join(re.findall(r"kWidth = (\d+)", line)))
        return found

    results = {}
    launch = Launch(1, stages=3)
    for dim in (64, 128):
        for queries, keys in ((1, 2048), (4, 512), (4, 2048)):
            for name, tree in (("decoding", False), ("tree", True)):
                ((_, compiled, _),) = kernels_of(paged, 4, queries, keys, dim, E4M3, tree, launch=launch)
                results[f"{name}, {queries} of {keys}, {dim}"] = products(compiled)
        run = prefill_attention.prefill_attention_triton
        ((_, compiled, _),) = kernels_of(prefilled, run, (32, 8, dim), E4M3)
        results[f"prefill, {dim}"] = products(compiled)
    return results


def prefill() -> dict:
    """Bytes of shared memory and of spills, products and loads by what carries them out."""

    def figures(compiled) -> dict[str, int]:
        layouts, ptx = compiled.asm["ttgir"], compiled.asm["ptx"]
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(ptx)
            file.flush()
            command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        return {
            "shared": compiled.metadata.shared,
            "spilled": sum(int(count) for count in re.findall(r"(\d+) bytes spill", said)),
            "asynchronous products": len(re.findall(r"warp_group_dot\b(?!_wait)", layouts)),
            "serialised": said.count("serialized"),
            "TMA loads": layouts.count("async_tma_copy_global_to_local"),
            "vector loads": len(re.findall(r"ld\.global\.v4", ptx)),
            "vector stores": len(re.findall(r"st\.global\.v4", ptx)),
        }

    results = {}
    for name, options in {
        "pointers": dict(gathered=False),
        "plain": dict(gathered=True),
        "E4M3": dict(gathered=True, cache=E4M3),
        "E4M3, float16": dict(gathered=True, cache=E4M3, dtype=torch.float16),
        "groups of 7": dict(gathered=True, heads=(28, 4, 128)),
        "heads of 64": dict(gathered=True, heads=(14, 2, 64)),
    }.items():
        for kernel, compiled, _ in kernels_of(prefilled, prefill_flat.flat_attention_triton, **options):
            results[f"{kernel.strip('_')}, {name}"] = figures(compiled)
    return results


def spills(cases: dict) -> dict:
    return {
        f"{name}: {kernel}": compiled.asm["ptx"].count(".local ")
        for name, run in cases.items()
        for kernel, compiled, _ in kernels_of(run)
    }


def steps() -> dict:
    """Registers that the kernels that grow and walk trees spill."""
    rows, queries = ints(3), 12
    found = tree_growth.FoundNodes.empty(3, 48, torch.device("cpu"))
    places = tree_growth.DraftPlaces(ints(8, 3), ints(16, 3))
    last = tree_growth.RunNodes.empty(2, 3, 4, torch.device("cpu"))
    pool = tree_choice.Candidates(ints(3, 48), ints(3, 48), floats(3, 48), ints(3, 48))
    nodes = tree_choice.ProposedNodes(ints(5, 15), ints(5, 15), ints(5, 15))
    nothing = ints(3, queries)
    gathered = Queries(nothing, nothing, nothing, rows, nothing, nothing, floats(3, queries))
    sampled = nothing, floats(3, queries)
    noise = floats(3), rows, rows
    cells = floats(33)

    def grow(run_last, width, following):
        inputs = ints(3 * width, 4), floats(3 * width, 4), floats(32)
        return tree_growth.grow_level_triton(*inputs, run_last, found, 4, places, 1, following)

    return spills(
        {
            "walking": lambda: tree_walk.walk_tree_triton(rows, ints(5, 15), ints(5, 15), gathered, *sampled),
            "candidates of some tokens": lambda: candidates.best_candidates_triton(
                floats(3, 5000), *noise, 4, vocabulary_V=ints(5000)
            ),
            "growing": lambda: grow(last, 4, 4),
            "growing from roots": lambda: grow(None, 1, 4),
            "choosing": lambda: tree_choice.choose_nodes_triton(pool, queries, rows, nodes),
            "counting": lambda: tree_counts.count_nodes_triton(
                nothing, nothing, rows, ints(5, 15), ints(5, 15), cells, cells, floats(2, 33)
            ),
            "rates": lambda: tree_counts.log_rates_triton(cells, cells, cells),
        }
    )


def training() -> dict:
    """The same of the kernels of learning, also where sizes are 1, which a launch makes constants."""
    step = adamw.AdamWStep(2, 1e-3, 0.9, 0.99, 0.1)
    device = torch.device("cpu")
    triton_support.torch.cuda.get_device_properties = lambda device: None
    norm = empty(9, 2560), empty(9, 2560), empty(9, 2560), empty(2560)
    qkv, table, weight = empty(9, 48 * 128), floats(9, 2, 64), empty(128)
    grads = empty(9, 32, 128), empty(9, 8, 128), empty(9, 8, 128)
    q, lse, own = empty(9, 32, 128), floats(9, 32), empty(4, 9, 8, 128)
    rope = rope_training
    diagonal = draft_diagonal
    cases = {
        "norm": lambda: norm_training.rms_norm_backward_triton(*norm, 1e-6),
        "rotation": lambda: rope.rotate_qk_triton(qkv, table, 32, 8, weight, weight, 1e-6),
        "rotation back": lambda: rope.rotate_qk_backward_triton(*grads, qkv, table, weight, weight, 1e-6),
        "own keys": lambda: diagonal.join_diagonal_triton(q, lse, q, own, own),
        "own keys back": lambda: diagonal.join_diagonal_backward_triton(
            q, q, own, own, q, lse, q, own.float(), own.float()
        ),
    }
    for size in (1, 4096):
        flat, wide = empty(size), floats(size)
        moments = [adamw_8bit.EightBit.zeros(size, device) for _ in range(2)]
        logits, rows = floats(5, size), (ints(5), floats(5), empty(5, size))
        back = empty(5, size), empty(5, 2 * size)
        cases |= {
            f"AdamW {size}": lambda f=flat, w=wide: adamw.adamw_triton(f, w, w.clone(), w, f, w, step),
            f"AdamW, 8 bits {size}": lambda f=flat, w=wide, m=moments: adamw_8bit.adamw_8bit_triton(
                f, w, *m, f, w, step
            ),
            f"logprobs {size}": lambda x=logits, r=rows: logprob_rows.logprob_rows_triton(x, *r),
            f"SwiGLU {size}": lambda b=back: swiglu_training.silu_multiply_backward_triton(*b),
        }
    return spills(cases)


if __name__ == "__main__":
    cases, capability, shared = sys.argv[1:]
    pretend(int(capability), int(shared))
    print(json.dumps({f.__name__: f for f in (sizes, attention, prefill, steps, training)}[cases]()))
