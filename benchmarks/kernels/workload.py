"""The sizes at which kernels are measured, and random operands for them."""

from dataclasses import dataclass

import torch

from benchmarks.timing import copies_for
from paceline.policy.config import DecoderConfig


@dataclass(frozen=True)
class DecodeSize:
    """A decode step (one query per row), or one that verifies `queries - 1` proposals."""

    rows: int
    context: int
    queries: int = 1

    def __str__(self) -> str:
        what = "decode" if self.queries == 1 else f"verify {self.queries - 1}"
        return f"{what}, {self.rows} rows, context {self.context}"


@dataclass(frozen=True)
class PrefillSize:
    """Chunks of `new` tokens of several sequences, each behind `context` tokens in the cache."""

    sequences: int
    new: int
    context: int = 0

    def __str__(self) -> str:
        return f"{self.sequences} x {self.new} new, context {self.context}"


@dataclass(frozen=True)
class Workload:
    """The sizes of every case."""

    rows: tuple[int, ...]  # tokens of a product, of the experts and of the history drafter
    logit_rows: tuple[int, ...]  # tokens that get logits at once
    decode: tuple[DecodeSize, ...]
    prefill: tuple[PrefillSize, ...]
    history_tokens: int  # that a row of the history drafter has room for


GPU_WORKLOAD = Workload(
    rows=(1, 8, 16, 32, 64, 128, 256, 1024),
    logit_rows=(1, 16, 64, 256),
    decode=(
        DecodeSize(1, 1024),
        DecodeSize(1, 8192),
        DecodeSize(16, 1024),
        DecodeSize(16, 4096),
        DecodeSize(64, 1024),
        DecodeSize(256, 256),
        DecodeSize(256, 1024),
        DecodeSize(1, 1024, queries=4),
        DecodeSize(16, 1024, queries=4),
        DecodeSize(64, 1024, queries=8),
    ),
    prefill=(PrefillSize(64, 128), PrefillSize(1, 8192), PrefillSize(1, 8192, 20_000)),
    history_tokens=16_384,
)
CPU_WORKLOAD = Workload(
    rows=(1, 8, 32),
    logit_rows=(1, 8),
    decode=(DecodeSize(1, 64), DecodeSize(8, 64), DecodeSize(4, 64, queries=4)),
    prefill=(PrefillSize(2, 32), PrefillSize(1, 32, 64)),
    history_tokens=2_048,
)


@dataclass(frozen=True)
class Operands:
    """Where cases get their tensors from: a model's shape on a device."""

    shape: DecoderConfig
    device: torch.device
    workload: Workload

    @classmethod
    def on(cls, device: torch.device, shape: DecoderConfig) -> "Operands":
        return cls(shape, device, GPU_WORKLOAD if device.type == "cuda" else CPU_WORKLOAD)

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and activations, the one that `bench_dtype` names for this device."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def tolerance(self) -> float:
        """The relative error that rounding in this type may leave between two orders of summation."""
        return 0.02 if self.dtype == torch.bfloat16 else 1e-4

    def random(self, *size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device).normal_(0, scale)

    def weights(self, *size: int) -> list[torch.Tensor]:
        """Returns copies of a weight, together larger than the device's cache."""
        one = self.random(*size, scale=size[-1] ** -0.5)
        copies = copies_for(one.nbytes, self.device)
        return [one, *(self.random(*size, scale=size[-1] ** -0.5) for _ in range(copies - 1))]
