"""What the compiler makes of the kernels, where bits hang on it; seen without a GPU."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def test_products_over_an_e4m3_cache_run_alike():
    """Decoding plainly, verifying and prefilling deal a product's terms to the same instructions in the same order; none is asynchronous."""
    run = subprocess.run([sys.executable, "-m", "tests.kernels.compiled_attention"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    results = json.loads(run.stdout.splitlines()[-1])
    assert len(results) == 6
    for kernel, products in results.items():
        assert products == results["prefill, 128"] and "asynchronous" not in products, (kernel, results)
