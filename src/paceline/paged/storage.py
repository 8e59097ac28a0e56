"""Device memory that can be lent out and come back: what the caches are made of."""

import math

import torch

from paceline.paged.virtual_memory import ReservedMemory


class PagedStorage:
    """One tensor. On a GPU its address never changes: graphs that captured it stay valid while its memory is
    lent out.
    """

    tensor: torch.Tensor | None  # None while it sleeps on a CPU

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.num_bytes = math.prod(shape) * dtype.itemsize
        self.reserved = ReservedMemory(self.num_bytes, device) if device.type == "cuda" else None
        if self.reserved is not None:
            self.tensor = self.reserved.tensor.view(dtype).view(shape)
            self.tensor.view(torch.uint8).zero_()
        else:
            self.wake()

    def wake(self) -> None:
        """Zeros, not garbage: a masked key must not meet a NaN."""
        if self.reserved is None:
            self.tensor = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        else:
            self.reserved.back()
            self.tensor.view(torch.uint8).zero_()

    def sleep(self) -> None:
        if self.reserved is None:
            self.tensor = None
        else:
            self.reserved.release()
