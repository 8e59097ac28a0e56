"""Weights for ranks that are processes of their own."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class WeightFile:
    """Weights as a safetensors file, which every rank maps."""

    path: str

    def read(self) -> Iterable[tuple[str, torch.Tensor]]:
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)
