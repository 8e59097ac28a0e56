"""AdamW with moments of eight bits: E4M3 in groups of 128 numbers, each with a float32 scale.

    first moment        as it is            second moment       its root, which needs half the range

Both are decayed averages that move by a percent a step, and E4M3's neighbours lie 6 to 12% apart: rounded to
the nearest they would never move. So they are rounded up or down at random, with the chances that keep the
mean; the random numbers are a function of the step and the place, so that an update is reproducible. A root
that is not zero is never rounded to zero, where it would divide.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.kernels.adamw import (
    ADAM_EPSILON,
    AdamWStep,
    adam_step,
    load_gradient,
    store_master,
    written_beside,
)
from paceline.kernels.fp8_format import E4M3, LARGEST, from_e4m3
from paceline.kernels.operation import cdiv, reference_of
from paceline.kernels.training_launch import plain_options
from paceline.kernels.triton_support import tl, triton

# Numbers that share a scale.
GROUP = 128
# Groups that a program updates.
GROUPS = 16
# The smallest largest magnitude that a scale is made for.
SMALLEST = 1e-30
# E4M3's smallest positive number.
TINIEST = 2.0**-9


@dataclass(frozen=True)
class EightBit:
    """A flat tensor as E4M3 in groups, `[groups, 128]`, filled up with zeros."""

    values: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def zeros(size: int, device: torch.device) -> "EightBit":
        groups = cdiv(size, GROUP)
        return EightBit(
            torch.zeros(groups, GROUP, dtype=torch.uint8, device=device).view(E4M3),
            torch.zeros(groups, dtype=torch.float32, device=device),
        )

    def wide(self) -> torch.Tensor:
        """Returns the numbers in float32, `[groups, 128]`."""
        return from_e4m3(self.values) * self.scales[:, None]


def _store_reference(out: EightBit, x: torch.Tensor, number: int, which: int) -> None:
    scales = x.abs().amax(-1).clamp(min=SMALLEST) / LARGEST
    scaled = x.abs() / scales[:, None]
    # Exponents below -6 are subnormal and share its step.
    quantum = torch.exp2(torch.frexp(scaled).exponent.sub(1).clamp(min=-6).float() - 3)
    rounded = (scaled / quantum + random_shares(x.numel(), number, which).view_as(x)).floor() * quantum
    if which == 1:
        rounded = torch.where(scaled > 0, rounded.clamp(min=TINIEST), rounded)
    out.values.copy_((rounded.clamp(max=LARGEST) * x.sign()).to(E4M3))
    out.scales.copy_(scales)


def random_shares(size: int, number: int, which: int) -> torch.Tensor:
    """Returns numbers in [0, 1) for `size` places, by the step's number and the moment's (0 or 1)."""
    h = torch.arange(size, dtype=torch.int64) * 0x9E3779B1 + number * 0x85EBCA77 + which * 0xC2B2AE3D
    h &= 0xFFFFFFFF
    h ^= h >> 16
    h = (h * 0x21F0AAAD) & 0xFFFFFFFF
    h ^= h >> 15
    h = (h * 0x735A2D97) & 0xFFFFFFFF
    h ^= h >> 15
    return (h >> 8).float() * 2.0**-24


@triton.jit
def _random_shares(place, number, WHICH: tl.constexpr):
    h = (place * 0x9E3779B1 + number.to(tl.int64) * 0x85EBCA77 + WHICH * 0xC2B2AE3D).to(tl.uint32)
    h = h ^ (h >> 16)
    h = (h * 0x21F0AAAD).to(tl.uint32)
    h = h ^ (h >> 15)
    h = (h * 0x735A2D97).to(tl.uint32)
    h = h ^ (h >> 15)
    return (h >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _load(values_ptr, scales_ptr, place, group, in_groups):
    scale = tl.load(scales_ptr + group, mask=in_groups, other=0.0)[:, None]
    return tl.load(values_ptr + place, mask=in_groups[:, None], other=0.0).to(tl.float32) * scale


@triton.jit
def _store(values_ptr, scales_ptr, x, place, group, in_groups, number, WHICH: tl.constexpr):
    scales = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-30) / 448.0
    scaled = tl.abs(x) / scales[:, None]
    exponent = tl.maximum(((scaled.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127, -6)
    quantum = ((exponent - 3 + 127) << 23).to(tl.float32, bitcast=True)
    rounded = tl.floor(scaled / quantum + _random_shares(place, number, WHICH)) * quantum
    if WHICH == 1:
        rounded = tl.where(scaled > 0, tl.maximum(rounded, 0.001953125), rounded)
    rounded = tl.minimum(rounded, 448.0)
    rounded = tl.where(x < 0, -rounded, rounded)
    tl.store(values_ptr + place, rounded.to(tl.float8e4nv), mask=in_groups[:, None])
    tl.store(scales_ptr + group, scales, mask=in_groups)


@triton.jit(do_not_specialize=["number"])
def _adamw_8bit_kernel(
    parameter_ptr,
    master_ptr,
    moments,
    gradient_ptr,
    scale_ptr,
    size,
    num_groups,
    number,
    numbers,
    GROUPS: tl.constexpr,
):
    first_ptr, first_scales_ptr, root_ptr, root_scales_ptr = moments
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    in_groups = group < num_groups
    place = group.to(tl.int64)[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = place < size
    first = _load(first_ptr, first_scales_ptr, place, group, in_groups)
    root = _load(root_ptr, root_scales_ptr, place, group, in_groups)
    master = tl.load(master_ptr + place, mask=mask, other=0.0)
    gradient = load_gradient(gradient_ptr, scale_ptr, master, place, mask)
    first, _, root, master = adam_step(first, root * root, master, gradient, numbers)
    store_master(parameter_ptr, master_ptr, master, place, mask)
    _store(first_ptr, first_scales_ptr, first, place, group, in_groups, number, 0)
    _store(root_ptr, root_scales_ptr, root, place, group, in_groups, number, 1)


def adamw_8bit_triton(parameter, master, first, second_root, gradient, scale, step):
    groups = len(first.scales)
    _adamw_8bit_kernel[(cdiv(groups, GROUPS),)](
        written_beside(parameter, master),
        master,
        (first.values, first.scales, second_root.values, second_root.scales),
        None if gradient is None else gradient.contiguous(),
        scale,
        master.numel(),
        groups,
        step.number,
        step.numbers,
        GROUPS=GROUPS,
        **plain_options(num_warps=4),
    )


@reference_of(adamw_8bit_triton)
def adamw_8bit(
    parameter: torch.Tensor,
    master: torch.Tensor,
    first: EightBit,
    second_root: EightBit,
    gradient: torch.Tensor | None,
    scale: torch.Tensor,
    step: AdamWStep,
) -> None:
    """Updates a float32 master, its moments and the parameter, as `adamw` does."""
    size = master.numel()
    flat = torch.zeros(size) if gradient is None else gradient.reshape(-1).float() * scale
    g = F.pad(flat, (0, -size % GROUP)).view(-1, GROUP)
    m = first.wide()
    m = m + (1 - step.beta1) * (g - m)
    v = second_root.wide().square() * step.beta2 + g * g * (1 - step.beta2)
    update = (m / (v.sqrt() / step.second_root + ADAM_EPSILON)).flatten()[:size].view_as(master)
    master.mul_(step.keep).sub_(update, alpha=step.step_size)
    if written_beside(parameter, master) is not None:
        parameter.copy_(master)
    _store_reference(first, m, step.number, 0)
    _store_reference(second_root, v.sqrt(), step.number, 1)
