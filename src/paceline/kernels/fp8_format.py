"""E4M3 numbers and the two ways they are scaled here (DeepSeek-V3's recipe, arXiv 2412.19437, section 3.3).

    weights         one scale per block of 128 x 128, a power of two
    activations     one float32 scale per row and group of 128 columns

    scale = max(largest magnitude, 1e-10) / 448        value = round(x / scale) in E4M3, largest magnitude 448

A weight's scale is the next power of two, so value x scale is exact in bf16, and quantising that product
again gives it back: a policy whose weights were rounded so is the same in FP8 and in its own type. E4M3 is
floating point, so this costs no precision.

Depths that are no multiple of 128 are filled up with zeros, so no product needs a mask. Divisions are rounded
correctly, on the GPU too: the kernels give the formula's bits.
"""

import functools
from dataclasses import dataclass

import torch

from paceline.kernels.triton_support import INTERPRETED, cdiv, tl, triton

E4M3 = torch.float8_e4m3fn
# The largest magnitude of E4M3.
LARGEST = 448.0
# The smallest largest magnitude that a scale is made for, so that zeros have a scale too.
SMALLEST_AMAX = 1e-10
# Columns (and, of weights, rows) that share a scale.
GROUP = 128
# cuBLAS wants rows in fours.
ROW_MULTIPLE = 4


@dataclass(frozen=True)
class QuantisedRows:
    """Activations `[M, K]` as E4M3 with a scale per row and group.

    Rows past `num_rows` are allocated and undefined.
    """

    values_MK: torch.Tensor
    scales_GM: torch.Tensor
    num_rows: int
    # The type of what was quantised, and of the products.
    dtype: torch.dtype

    @staticmethod
    def empty(num_rows: int, depth: int, dtype: torch.dtype, device: torch.device) -> "QuantisedRows":
        """Allocates rows of `depth` columns, filled up to whole groups."""
        rows = cdiv(num_rows, ROW_MULTIPLE) * ROW_MULTIPLE
        groups = cdiv(depth, GROUP)
        values_MK = torch.empty(rows, groups * GROUP, dtype=E4M3, device=device)
        return QuantisedRows(
            values_MK, torch.empty(groups, rows, dtype=torch.float32, device=device), num_rows, dtype
        )

    def dequantise(self) -> torch.Tensor:
        """Returns `[M, K]` in float32, K filled up to whole groups."""
        values_MGC = from_e4m3(self.values_MK[: self.num_rows]).unflatten(1, (-1, GROUP))
        return (values_MGC * self.scales_GM[:, : self.num_rows].t().unsqueeze(-1)).flatten(1)


@dataclass(frozen=True)
class BlockMatrix:
    """A weight `[..., N, K]` as E4M3 with a scale per block of 128 x 128.

    K is filled up to whole blocks, N is not.
    """

    values: torch.Tensor
    # [..., blocks of N, blocks of K].
    scales: torch.Tensor
    # On a CPU the same numbers in float32, so that products need not convert them again.
    wide: torch.Tensor | None = None

    @staticmethod
    def poisoned(
        shape: torch.Size, device: torch.device, scales: torch.Tensor | None = None
    ) -> "BlockMatrix":
        """Allocates a weight whose every number is NaN, so that an unwritten one is noticed."""
        *leading, width, depth = shape
        padded = (*leading, width, cdiv(depth, GROUP) * GROUP)
        values = torch.full(padded, 0xFF, dtype=torch.uint8, device=device).view(E4M3)
        if scales is None:
            scales = torch.empty(scale_shape(shape), dtype=torch.float32, device=device)
        wide = torch.full(padded, torch.nan) if device.type == "cpu" else None
        return BlockMatrix(values, scales.fill_(torch.nan), wide)

    def dequantise(self) -> torch.Tensor:
        """Returns float32 numbers, K filled up to whole blocks."""
        scales = self.scales.repeat_interleave(GROUP, -1).repeat_interleave(GROUP, -2)
        return from_e4m3(self.values) * scales[..., : self.values.shape[-2], :]

    def expert(self, index: int) -> "BlockMatrix":
        return BlockMatrix(
            self.values[index], self.scales[index], None if self.wide is None else self.wide[index]
        )


def scale_shape(shape: torch.Size) -> tuple[int, ...]:
    return (*shape[:-2], cdiv(shape[-2], GROUP), cdiv(shape[-1], GROUP))


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    """Returns the scale that makes the largest magnitude `amax` E4M3's largest."""
    return amax.float().clamp(min=SMALLEST_AMAX) / LARGEST


def power_of_two_scale(amax: torch.Tensor) -> torch.Tensor:
    """Returns the smallest power of two that is at least `scale_of`; NaN and infinity stay."""
    bits = scale_of(amax).view(torch.int32)
    whole = (bits + 0x7FFFFF) & 0x7F800000
    return torch.where(amax.isfinite(), whole.view(torch.float32), scale_of(amax))


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounds to nearest, clamped to the largest magnitude; torch versions differ in what they do beyond."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def round_to_e4m3(x_THD: torch.Tensor, scale_H: torch.Tensor) -> torch.Tensor:
    """Returns what heads stand for in a cache in E4M3 with these scales."""
    scale_H1 = scale_H.unsqueeze(1)
    return (from_e4m3(to_e4m3(x_THD.float() / scale_H1)) * scale_H1).to(x_THD.dtype)


@functools.cache
def _e4m3_values() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(E4M3).float()


def from_e4m3(x: torch.Tensor) -> torch.Tensor:
    # On a CPU by a table: torch converts one number at a time, ten times slower.
    if x.is_cuda:
        return x.float()
    return _e4m3_values().index_select(0, x.reshape(-1).view(torch.uint8).int()).view(x.shape)


@triton.jit
def quantise_groups(x, POWER_OF_TWO: tl.constexpr = False):
    """Returns E4M3 values and scales of a block `[..., 128]` in float32, one scale for the last axis."""
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=-1), 1e-10), 448.0)
    if POWER_OF_TWO:
        scale = power_of_two(scale)
    return e4m3_of(x, tl.expand_dims(scale, -1)), scale


@triton.jit
def power_of_two(scale):
    """Returns the smallest power of two that is at least `scale`, above 0; NaN and infinity stay."""
    bits = scale.to(tl.int32, bitcast=True)
    whole = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(bits < 0x7F800000, whole, scale)


@triton.jit
def e4m3_of(x, scale):
    """Returns x / scale in E4M3; `scale` is one number for many of x."""
    scaled = tl.clamp(_quotient(x, scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    if EMULATED:
        scaled = _rounded(scaled)
    return scaled.to(tl.float8e4nv)


# Triton's interpreter does not round when it converts, and rounds twice where a GPU fuses.
EMULATED = tl.constexpr(INTERPRETED)


@triton.jit
def _quotient(x, scale):
    """Returns x / scale, rounded correctly: one division for all of x, and two corrections of each quotient.

    The first makes it one of the two numbers next to the exact one, the second then the nearer (Markstein
    1990, doi:10.1147/rd.341.0111).
    """
    if EMULATED:
        quotient = tl.div_rn(x, scale)
    else:
        inverse = tl.div_rn(1.0, scale)
        # Not 0 - x, as the sign would be: in this form a zero keeps its sign.
        minus_x, minus_inverse = x * -1.0, inverse * -1.0
        quotient = x * inverse
        quotient = tl.fma(tl.fma(quotient, scale, minus_x), minus_inverse, quotient)
        quotient = tl.fma(tl.fma(quotient, scale, minus_x), minus_inverse, quotient)
    return quotient


@triton.jit
def _rounded(x):
    """Returns the nearest E4M3 number in float32.

    That is a multiple of 2^(exponent - 3), where exponents below -6 count as -6.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum(((bits >> 23) & 0xFF) - 127, -6)
    quantum = ((exponent - 3 + 127) << 23).to(tl.float32, bitcast=True)
    # What is added to 2^23 is rounded to an integer, ties to even.
    magnitude = ((tl.abs(x) / quantum + 8388608.0) - 8388608.0) * quantum
    return (magnitude.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)
