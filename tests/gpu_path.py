"""The code that a GPU runs, without one: tensors on the meta device that say they are CUDA's, and kernels
that do nothing.

Shapes, and so the order and sizes of allocations, are exactly the GPU's; numbers there are none. What torch's
own CUDA code allocates within an operation is not seen, but for its sort
(aten/src/ATen/native/cuda/SortStable.cu: two arrays of index and segment, a copy of the keys, and the radix
sort's second buffers).
"""

import gc
import importlib
import pkgutil
from contextlib import ExitStack

import pytest
import torch
from torch.overrides import TorchFunctionMode

import paceline.kernels
from paceline.drafting.base import Drafter, DrafterContext
from paceline.engine.graphs import StepRunner
from paceline.engine.rows import Rows
from paceline.engine.settings import EngineSettings
from paceline.kernels import triton_support
from paceline.paged.cache import KVCache
from paceline.paged.forward import PagedForward
from paceline.plan.memory_tracker import MemoryTracker
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.precision.rollout import RolloutPrecision
from paceline.precision.weights import QuantisedWeights

META = torch.device("meta")
PROCESSORS = 132
SORT_BYTES = (8, 8, 4, 12)  # per number, of which a row's sort makes these


class _Silent:
    def __getitem__(self, grid):
        return lambda *arguments, **options: None


class _SaysCuda(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return True if func == torch.Tensor.is_cuda.__get__ else func(*args, **(kwargs or {}))


def silence_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_types = tuple({type(triton_support.wait_previous)})
    for found in pkgutil.iter_modules(paceline.kernels.__path__):
        module = importlib.import_module(f"paceline.kernels.{found.name}")
        for name, value in list(vars(module).items()):
            if isinstance(value, kernel_types):
                monkeypatch.setattr(module, name, _Silent())
        for name, replacement in (
            ("multiprocessors", lambda device: PROCESSORS),
            ("TensorDescriptor", lambda *arguments: None),
        ):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, replacement)
    monkeypatch.setattr("paceline.engine.graphs.multiprocessors", lambda device: PROCESSORS)
    monkeypatch.setattr(QuantisedWeights, "sync", lambda self: None)  # looks at numbers


class on_gpu(ExitStack):  # noqa: N801  (used like a function)
    def __init__(self) -> None:
        super().__init__()
        self.enter_context(_SaysCuda())
        self.enter_context(torch.inference_mode())


def make_runner(
    shape: DecoderConfig,
    settings: EngineSettings,
    drafters: tuple[Drafter, ...] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> StepRunner:
    """As `Engine` makes it."""
    with on_gpu():
        policy = Decoder(shape, dtype, META)
        reduced = RolloutPrecision(policy, settings.precision)
        cache = KVCache(
            shape, 64, reduced.cache_dtypes, META, reduced.cache_scales_L2H, settings.records_routing
        )
        rows = Rows(settings.max_running, settings.max_length or shape.max_positions, torch.float32, META)
        captured = {layer for drafter in drafters for layer in drafter.captured_layers}
        runner = StepRunner(
            PagedForward(policy, cache, settings.deterministic, captured, reduced.weights),
            rows,
            settings,
            drafters,
        )
        if settings.verify == "rejection":
            runner.keep_probabilities(shape.vocab_size, torch.float32)
        for drafter in drafters:
            drafter.bind(
                DrafterContext(
                    policy,
                    rows.state,
                    runner.proposals.tokens_SK,
                    runner.proposals.parents_SK,
                    runner.probabilities_SKV,
                    64,
                    settings.deterministic,
                    rows.state.tokens.shape[1],
                )
            )
    runner.memory.budget = settings.graph_memory  # which it ignores where there is no GPU
    return runner


class Allocations(MemoryTracker):
    """Every allocation and release while it is on, in order: (which, bytes), negative when it is released.
    What exists already is not counted.
    """

    def __init__(self) -> None:
        # Kept: a tensor that the garbage collector takes meanwhile would leave its place to one that counts.
        self._known_tensors = [
            found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)
        ]
        super().__init__(self._known_tensors)
        self.events: list[tuple[int, int]] = []
        self._transient = 0

    def __exit__(self, *problem):
        self._known_tensors.clear()  # what still counts may keep this object for long
        return super().__exit__(*problem)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.sort.stable or len(args[0]) == 1:
            return super().__torch_dispatch__(func, types, args, kwargs)
        sizes = [size * args[0].numel() for size in SORT_BYTES]
        keys = [self._event(0, size) for size in sizes]
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for key, size in zip(keys, sizes, strict=True):
            self._event(key, -size)
        return out

    def _event(self, key: int, size: int) -> int:
        if not key:
            self._transient -= 1
            key = self._transient
        self.live += size
        self.peak = max(self.peak, self.live)
        self.events.append((key, size))
        return key

    def _count(self, storage: torch.UntypedStorage) -> None:
        before = self.live
        super()._count(storage)
        if self.live != before:
            self.events.append((storage._cdata, self.live - before))

    def _forget(self, key: int, size: int) -> None:
        super()._forget(key, size)
        if size:
            self.events.append((key, -size))
