"""What AdamW keeps of one parameter, and where: on the device, on it in eight bits, or in host memory.

                          bytes on the GPU per bf16 weight        beside weight and gradient
    device                12      float32 master and moments
    8bit                  6.1     float32 master, moments in E4M3 (kernels/adamw_8bit.py)
    host                  0       master and moments come and go in pieces, through two streams, so that one
                                  piece's way back overlaps with the next one's way there

A parameter that is float32 already is its own master, on the device in every case.
"""

from collections.abc import Iterator
from typing import Literal, Protocol

import torch

from paceline.kernels.adamw import AdamWStep, adamw
from paceline.kernels.adamw_8bit import EightBit, adamw_8bit

OptimiserState = Literal["device", "8bit", "host"]
# Elements that come from host memory at a time.
PIECE_ELEMENTS = 1 << 26
STREAMS = 2


class ParameterState(Protocol):
    """What is kept of one parameter."""

    master: torch.Tensor

    def moments(self) -> dict[str, torch.Tensor]:
        """Returns the moments' tensors by the names they have in a checkpoint."""

    def step(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor | None,
        scale: torch.Tensor,
        step: AdamWStep,
    ) -> None:
        """Updates everything with `scale` times the gradient."""


class DeviceState:
    """Master and moments in float32 (float64 for such parameters) where the parameter is."""

    def __init__(self, parameter: torch.Tensor, own_master: bool = True) -> None:
        self.master = _master(parameter, own_master)
        self.first = torch.zeros_like(self.master)
        self.second = torch.zeros_like(self.master)

    def moments(self) -> dict[str, torch.Tensor]:
        return {"first": self.first, "second": self.second}

    def step(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor | None,
        scale: torch.Tensor,
        step: AdamWStep,
    ) -> None:
        adamw(parameter, self.master, self.first, self.second, gradient, scale, step)


class EightBitState:
    """A float32 master, and moments of eight bits."""

    def __init__(self, parameter: torch.Tensor, own_master: bool = True) -> None:
        self.master = _master(parameter, own_master)
        self.first = EightBit.zeros(parameter.numel(), parameter.device)
        self.second_root = EightBit.zeros(parameter.numel(), parameter.device)

    def moments(self) -> dict[str, torch.Tensor]:
        return {
            "first": self.first.values,
            "first_scales": self.first.scales,
            "second_root": self.second_root.values,
            "second_root_scales": self.second_root.scales,
        }

    def step(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor | None,
        scale: torch.Tensor,
        step: AdamWStep,
    ) -> None:
        adamw_8bit(parameter, self.master, self.first, self.second_root, gradient, scale, step)


class HostState:
    """Master and moments in host memory, page-locked where there is a GPU; the step runs on the device."""

    def __init__(self, parameter: torch.Tensor, own_master: bool = True) -> None:
        is_master = own_master and _is_wide(parameter)
        self.master = parameter.detach() if is_master else _hosted(parameter).copy_(parameter)
        self.first = _hosted(parameter).zero_()
        self.second = _hosted(parameter).zero_()

    def moments(self) -> dict[str, torch.Tensor]:
        return {"first": self.first, "second": self.second}

    def step(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor | None,
        scale: torch.Tensor,
        step: AdamWStep,
    ) -> None:
        """Updates everything with `scale` times the gradient; returns when the host has it."""
        flat = parameter.detach().view(-1)
        flat_gradient = None if gradient is None else gradient.reshape(-1)
        for part in _pieces(flat.numel(), flat.device):
            hosted = [tensor.view(-1)[part] for tensor in (self.master, self.first, self.second)]
            there = [tensor.to(flat.device, non_blocking=True) for tensor in hosted]
            adamw(flat[part], *there, None if flat_gradient is None else flat_gradient[part], scale, step)
            for tensor, copy in zip(hosted, there, strict=True):
                if copy.data_ptr() != tensor.data_ptr():
                    tensor.copy_(copy, non_blocking=True)


def _pieces(size: int, device: torch.device) -> Iterator[slice]:
    """Yields parts of a flat tensor; on a GPU, code that follows runs on each stream in turn."""
    parts = [slice(start, start + PIECE_ELEMENTS) for start in range(0, size, PIECE_ELEMENTS)]
    if device.type != "cuda":
        yield from parts
        return
    main = torch.cuda.current_stream(device)
    streams = [torch.cuda.Stream(device) for _ in range(min(STREAMS, len(parts)))]
    for index, part in enumerate(parts):
        stream = streams[index % len(streams)]
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            yield part
    for stream in streams:
        stream.synchronize()


def make_state(kind: OptimiserState, parameter: torch.Tensor, own_master: bool = True) -> ParameterState:
    """Returns what is kept of a parameter, at zero steps; float64 ones are always kept as they are.

    With `own_master` a parameter that is wide enough is its own master.
    """
    if parameter.dtype == torch.float64:
        return DeviceState(parameter, own_master)
    return {"device": DeviceState, "8bit": EightBitState, "host": HostState}[kind](parameter, own_master)


def _master(parameter: torch.Tensor, own_master: bool) -> torch.Tensor:
    if not _is_wide(parameter):
        return parameter.detach().float()
    return parameter.detach() if own_master else parameter.detach().clone()


def _hosted(parameter: torch.Tensor) -> torch.Tensor:
    device = parameter.device if parameter.is_meta else torch.device("cpu")
    return torch.empty(parameter.shape, dtype=torch.float32, device=device, pin_memory=parameter.is_cuda)


def _is_wide(parameter: torch.Tensor) -> bool:
    return parameter.dtype in (torch.float32, torch.float64)
