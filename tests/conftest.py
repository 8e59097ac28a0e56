"""Every test process runs on one thread, so that results do not depend on the number of cores. It stays so
when a run asks for more: where a process has used several threads, a fork of it that does hangs (OpenMP).
It multiplies without oneDNN, as it would from the first run on (`device.py`): which test came before decides
over no bit.

Every test draws its random inputs from a seed of its own, so that a failure can be repeated alone; inputs
never seen before come with PACELINE_TEST_SEED=NUMBER.

What imports have made is set aside from garbage collection: with torch, transformers and Triton loaded that
is a million objects, which every full collection would look at again.
"""

import gc
import itertools
import os
import random
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

torch.set_num_threads(1)
really_set_num_threads = torch.set_num_threads
torch.set_num_threads = lambda count: None
torch.backends.mkldnn.enabled = False
SEED = os.environ.get("PACELINE_TEST_SEED", "")
# Without limits of time: what an example takes says more about the machine than about the code.
hypothesis.settings.register_profile(
    "paceline",
    derandomize=not SEED,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("paceline")


def draw_from(name: str) -> None:
    """Makes the process's generators start from a seed that belongs to a name."""
    seed = zlib.crc32(f"{SEED}{name}".encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> None:
    """Seeds what several tests share, whichever of them comes first."""
    if fixturedef.scope != "function":
        draw_from(f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param_index', 0)}]")


@pytest.fixture(autouse=True)
def own_seed(request: pytest.FixtureRequest) -> None:
    """Seeds a test, with the fixtures that are made for it alone."""
    draw_from(request.node.nodeid)


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[Path]]:
    """Names folders that do not exist yet; the first one is the cache of what several tests share."""
    parent = tmp_path_factory.mktemp("caches")
    names = (parent / str(number) for number in itertools.count())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(next(names)))
        yield names


@pytest.fixture(autouse=True)
def own_cache(caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps what a test leaves in the user's cache out of it, and what is there out of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(next(caches)))


@pytest.fixture
def set_num_threads() -> Iterator[Callable[[int], None]]:
    """Lets a test use several threads."""
    yield really_set_num_threads
    really_set_num_threads(1)


@pytest.fixture
def cpu_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the code take times on a clock that stands still while the machine does something else."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)


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
