"""Device memory that can be released and allocated again: the storage of the caches."""

import math

import torch

from paceline.paged.virtual_memory import ReservedMemory


class PagedStorage:
    """One tensor whose memory can be released.

    On a GPU its address never changes: graphs that captured it stay valid while it sleeps.
    """

    # None while it sleeps on a CPU.
    tensor: torch.Tensor | None

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.num_bytes = math.prod(shape) * dtype.itemsize
        self.reserved = ReservedMemory(self.num_bytes, device) if device.type == "cuda" else None
        if self.reserved is not None:
            self.tensor = self.reserved.tensor.view(dtype).view(shape)
            self.tensor.view(torch.uint8).zero_()
        else:
            self.wake()

    def wake(self) -> None:
        """Allocates the memory and fills it with zeros: a masked key must not be NaN."""
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
