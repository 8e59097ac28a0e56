"""Prints the files of the GPU tests or of the slow ones: all, or one of several shares of about equal weight.

`make test-gpu PART=2` runs what `scripts/shares.py gpu --part 2 --parts 4` prints. Only files with GPU tests
are given to pytest there, so that nothing else has to be importable where the GPU is. `make test-all PART=1`
deals every test file: what is in no share is run by nobody. Needs nothing but Python.
"""

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

# A GPU test is marked, or takes the fixture `device` of tests/kernels/conftest.py, one of whose values is.
MARKED = re.compile(r"\bmark\.gpu\b")
TAKES_DEVICE = re.compile(r"\bdef test_\w+\([^)]*\bdevice\b", re.DOTALL)

# Relative weights, set by hand. GPU: about the number of a file's tests, ten for each that runs an engine.
GPU_WEIGHTS = {
    "tests/pacing/test_engine_pacing.py": 50,
    "tests/drafting/test_drafters_gpu.py": 50,
    "tests/kernels/test_prefill_flat.py": 45,
    "tests/engine/test_engine_gpu.py": 40,
    "tests/precision/test_engine_fp8_gpu.py": 40,
    "tests/kernels/test_attention.py": 32,
    "tests/kernels/test_moe.py": 29,
    "tests/kernels/test_fp8.py": 16,
    "tests/kernels/test_fp8_kv.py": 15,
    "tests/learning/test_learner_gpu.py": 10,
    "tests/kernels/test_layer_kernels.py": 10,
    "tests/kernels/test_linear.py": 10,
    "tests/kernels/test_sampler.py": 10,
}
# Slow: about the seconds of a file's slow tests on one core.
SLOW_WEIGHTS = {
    "tests/soak/test_soak.py": 900,
    "tests/test_countdown_learns.py": 200,
    "tests/vllm_backend/test_vllm_rollouts.py": 150,
    "tests/test_builtin_learns.py": 150,
    "tests/kernels/test_compiled.py": 150,
    "tests/vllm_backend/test_vllm_server.py": 120,
    "tests/kernels/test_attention.py": 120,
    "tests/drafting/test_trees.py": 120,
    "tests/cluster/test_idle_runs.py": 120,
    "tests/certify/test_mutants.py": 110,
    "tests/certify/test_fp8.py": 90,
    "tests/test_builtin_moe_learns.py": 100,
    "tests/precision/test_builtin_fp8_learns.py": 100,
    "tests/peers/test_vllm.py": 90,
    "tests/browser/test_pages.py": 90,
    "tests/engine/test_step_bytes.py": 70,
    "tests/engine/test_sampling.py": 70,
    "tests/drafting/test_model_drafters.py": 70,
    "tests/rollout/test_kills.py": 60,
    "tests/peers/test_vllm_eagle.py": 60,
    "tests/learning/test_fused.py": 60,
    "tests/learning/test_exact.py": 60,
    "tests/cluster/test_ray.py": 60,
    "tests/cluster/test_ranks.py": 60,
    "tests/cluster/test_chaos.py": 60,
    "tests/kernels/test_prefill_flat.py": 50,
    "tests/worker/test_worker.py": 40,
    "tests/kernels/test_tree_attention.py": 40,
    "tests/examples/test_examples.py": 40,
    "tests/drafting/test_online_run.py": 40,
    "tests/drafting/test_draft_attention.py": 40,
}
WEIGHTS = {"gpu": GPU_WEIGHTS, "slow": SLOW_WEIGHTS}
WEIGHT_OF_OTHERS = {"gpu": 5, "slow": 10}


def files_of(kind: str) -> list[str]:
    """Returns the paths, relative to the repository, of the test files that are dealt."""
    files = sorted(ROOT.glob("tests/**/test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if kind != "gpu" or has_gpu_tests(file)]


def has_gpu_tests(file: Path) -> bool:
    """Says whether a file has tests that carry the mark `gpu`."""
    text = file.read_text()
    return bool(MARKED.search(text)) or (file.parent.name == "kernels" and bool(TAKES_DEVICE.search(text)))


def split(kind: str, parts: int) -> list[list[str]]:
    """Returns the files in so many shares: the heaviest first, each to the share with the least so far."""

    def weight_of(file: str) -> int:
        return WEIGHTS[kind].get(file, WEIGHT_OF_OTHERS[kind])

    shares: list[list[str]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for file in sorted(files_of(kind), key=weight_of, reverse=True):
        lightest = totals.index(min(totals))
        shares[lightest].append(file)
        totals[lightest] += weight_of(file)
    return [sorted(share) for share in shares]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=WEIGHTS, help="which tests are dealt")
    parser.add_argument("--part", type=int, default=1, help="which share to print, from 1 on")
    parser.add_argument("--parts", type=int, default=1, help="how many shares there are")
    options = parser.parse_args()
    if not 1 <= options.part <= options.parts:
        parser.error(f"--part {options.part}: must be from 1 to {options.parts}")
    print(*split(options.kind, options.parts)[options.part - 1])


if __name__ == "__main__":
    main()
