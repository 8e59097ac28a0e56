"""Every test process runs on one thread, so that results do not depend on the number of cores.

What imports have made is set aside from garbage collection: with torch, transformers and Triton loaded that
is a million objects, which every full collection would look at again.
"""

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yields names of folders that do not exist yet."""
    parent = tmp_path_factory.mktemp("caches")
    return (parent / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def own_cache(caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps what a test leaves in the user's cache out of it, and what is there out of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(next(caches)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # so that libraries find their objects gone when the interpreter ends
