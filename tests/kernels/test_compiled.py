"""What the compiler makes of the kernels, where bits hang on it; seen without a GPU."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def printed_by(*command: str) -> dict:
    """By a process of its own, since the kernels here are interpreted."""
    run = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "capability, limit",
    [pytest.param(89, 101_376, id="RTX 4090"), pytest.param(90, 232_448, id="H200", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("which", ["largest", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_kernels_fit_a_gpus_shared_memory(capability, limit, which):
    """Fewer tiles are in flight where there is little of it, and all on the GPU they were tuned for."""
    results = printed_by("tests.kernels.compiled_sizes", str(capability), str(limit), which)
    assert len(results) == (7 if which == "largest" else 19)
    assert all(taken <= limit for taken, _, _ in results.values()), results
    _, meant, stages = results.pop("prefill, heads of 256")
    assert 1 <= stages < meant, "more than even the large one has"
    assert all(
        2 <= stages <= meant and (stages == meant or capability < 90) for _, meant, stages in results.values()
    ), results


@pytest.mark.slow
def test_fast_prefill_fits_an_h200_and_overlaps():
    """All stages fit; nothing is spilled; gathered tiles come by TMA, and products run beside the softmax."""
    results = printed_by("tests.kernels.compiled_prefill")
    assert len(results) == 9
    assert all(found["shared"] <= 232_448 and not found["spilled"] for found in results.values()), results
    for name, found in results.items():
        if name.startswith("gathered"):
            # Two products and two loads a step, in the loops with and without mask; loads of the first two
            # steps come before each.
            assert found["asynchronous products"] == 2 * 2 and not found["serialised"], (name, results)
            assert found["TMA loads"] == 2 * 2 * 3, (name, results)
        elif name.startswith("gathering"):
            assert found["vector loads"] and found["vector stores"] == 16, (name, results)


@pytest.mark.slow
def test_attention_products_over_an_e4m3_cache_run_alike():
    """Decoding, verifying and prefilling deal a product's terms to the same instructions in the same order.

    None of them is asynchronous.
    """
    results = printed_by("tests.kernels.compiled_attention")
    assert len(results) == 10
    for kernel, products in results.items():
        # A tree's tiles are those its nodes share and those they have for themselves.
        loops = 2 if kernel.startswith("tree") else 1
        assert products == loops * results["prefill, 128"], (kernel, results)
    assert "asynchronous" not in results["prefill, 128"]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [pytest.param(89, marks=pytest.mark.slow), 90])
def test_tree_kernels_compile_without_spilling(capability):
    results = printed_by("tests.kernels.compiled_step", str(capability))
    assert len(results) == 8 and not any(results.values()), results


@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, 90])
def test_training_kernels_compile_without_spilling(capability):
    results = printed_by("tests.kernels.compiled_training", str(capability))
    assert len(results) == 18 and not any(results.values()), results


@pytest.mark.slow
def test_quantising_by_a_table_reads_and_writes_vectors_as_without():
    """The compiler knows nothing of an address out of a table but what the kernel says."""
    results = printed_by("tests.kernels.compiled_quantise")
    assert not any(figures["spilled"] for figures in results.values()), results
    assert results["many"] == results["one"] and results["one"]["vector loads"] == 8
    assert results["many, float32"]["vector loads"] == 16
    assert results["many, not aligned"]["vector loads"] == 0
    assert results["many, copied"] == {"vector loads": 8, "vector stores": 4 + 8, "spilled": 0}
    assert results["many, not aligned"]["vector stores"] == 4
