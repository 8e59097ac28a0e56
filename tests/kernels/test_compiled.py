"""What the compiler makes of the kernels, where bits hang on it; seen without a GPU (compiled.py)."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow
H200 = 232_448


def printed_by(*command: str) -> dict:
    """By a process of its own, since the kernels here are interpreted."""
    run = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def compiled(cases: str, capability: int = 90, shared: int = H200) -> dict:
    return printed_by("tests.kernels.compiled", cases, str(capability), str(shared))


@pytest.mark.parametrize("capability, limit", [(89, 101_376), (90, H200)], ids=["RTX 4090", "H200"])
def test_kernels_fit_a_gpus_shared_memory(capability, limit):
    """Fewer tiles are in flight where there is little of it, and all on the GPU they were tuned for."""
    results = compiled("sizes", capability, limit)
    assert len(results) >= 16
    assert all(taken <= limit for taken, _, _ in results.values()), results
    wide = next(name for name in results if name.startswith("prefill, heads of 256"))
    _, meant, stages = results.pop(wide)
    assert 1 <= stages < meant, "more than even the large one has"
    assert all(
        2 <= stages <= meant and (stages == meant or capability < 90) for _, meant, stages in results.values()
    ), results


def test_fast_prefill_fits_an_h200_and_overlaps():
    """All stages fit; nothing is spilled; gathered tiles come by TMA, and products run beside the softmax."""
    results = compiled("prefill")
    assert len(results) == 11
    assert all(found["shared"] <= H200 and not found["spilled"] for found in results.values()), results
    for name, found in results.items():
        if name.startswith("gather_kernel"):
            assert found["vector loads"] and found["vector stores"] == 16, (name, results)
        elif "pointers" not in name:
            # Two products and two loads a step, in the loops with and without mask; loads of the first two
            # steps come before each.
            assert found["asynchronous products"] == 2 * 2 and not found["serialised"], (name, results)
            assert found["TMA loads"] == 2 * 2 * 3, (name, results)


def test_attention_products_over_an_e4m3_cache_run_alike():
    """Decoding, verifying and prefilling deal a product's terms to the same instructions in the same order.

    None of them is asynchronous.
    """
    results = compiled("attention")
    assert len(results) == 2 * (2 * 3 + 1)
    for kernel, products in results.items():
        # A tree's tiles are those its nodes share and those they have for themselves.
        loops = 2 if kernel.startswith("tree") else 1
        assert products == loops * results["prefill, 128"], (kernel, results)
    assert "asynchronous" not in results["prefill, 128"]


@pytest.mark.parametrize("cases, kernels", [("steps", 9), ("training", 13)])
@pytest.mark.parametrize("capability", [89, 90])
def test_kernels_of_steps_and_learning_do_not_spill(cases, kernels, capability):
    results = compiled(cases, capability)
    assert len(results) == kernels and not any(results.values()), results


def test_quantising_by_a_table_reads_and_writes_vectors_as_without():
    """The compiler knows nothing of an address out of a table but what the kernel says."""
    results = printed_by("tests.kernels.compiled_quantise")
    assert not any(figures["spilled"] for figures in results.values()), results
    assert results["many"] == results["one"] and results["one"]["vector loads"] == 8
    assert results["many, float32"]["vector loads"] == 16
    assert results["many, not aligned"]["vector loads"] == 0
    assert results["many, copied"] == {"vector loads": 8, "vector stores": 4 + 8, "spilled": 0}
    assert results["many, not aligned"]["vector stores"] == 4
