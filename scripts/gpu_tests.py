"""Prints the test files that hold GPU tests: all of them, or one of several shares of about equal weight.

`make test-gpu PART=2` runs what `scripts/gpu_tests.py --part 2 --parts 4` prints. Only these files are given
to pytest, so that nothing else has to be importable where the GPU is. Needs nothing but Python.
"""

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

# A test is marked itself, or takes the fixture `device` of tests/kernels/conftest.py, one of whose values is.
MARKED = re.compile(r"\bmark\.gpu\b")
TAKES_DEVICE = re.compile(r"\bdef test_\w+\([^)]*\bdevice\b", re.DOTALL)

# Relative weights, set by hand: about the number of a file's GPU tests, and ten for each that runs an engine.
WEIGHTS = {
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
WEIGHT_OF_OTHERS = 5


def gpu_test_files() -> list[str]:
    """Returns the paths, relative to the repository, of test files with at least one GPU test."""
    return [
        str(file.relative_to(ROOT)) for file in sorted(ROOT.glob("tests/**/test_*.py")) if has_gpu_tests(file)
    ]


def has_gpu_tests(file: Path) -> bool:
    """Says whether a file has tests that carry the mark `gpu`."""
    text = file.read_text()
    return bool(MARKED.search(text)) or (file.parent.name == "kernels" and bool(TAKES_DEVICE.search(text)))


def split(files: list[str], parts: int) -> list[list[str]]:
    """Returns the files in so many shares: the longest first, each to the share with the least so far."""
    shares: list[list[str]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for file in sorted(files, key=weight_of, reverse=True):
        shortest = totals.index(min(totals))
        shares[shortest].append(file)
        totals[shortest] += weight_of(file)
    return [sorted(share) for share in shares]


def weight_of(file: str) -> int:
    """Returns what a file counts for when shares are balanced."""
    return WEIGHTS.get(file, WEIGHT_OF_OTHERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=int, default=1, help="which share to print, from 1 on")
    parser.add_argument("--parts", type=int, default=1, help="how many shares there are")
    options = parser.parse_args()
    if not 1 <= options.part <= options.parts:
        parser.error(f"--part {options.part}: must be from 1 to {options.parts}")
    print(*split(gpu_test_files(), options.parts)[options.part - 1])


if __name__ == "__main__":
    main()
