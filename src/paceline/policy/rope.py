"""Rotary position embedding: frequencies of the supported scalings, the cos/sin table, the rotation.

The half-split convention of Hugging Face: dimension i rotates with dimension i + D/2.
"""

import math

import torch

from paceline.policy.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Returns float32 frequencies `[head_dim / 2]` and the factor on cos and sin."""
    wavelengths = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    inverse = 1.0 / wavelengths
    p = rope.parameters
    if rope.kind == "default":
        return inverse, 1.0
    if rope.kind == "linear":
        return inverse / p["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(inverse, p), 1.0
    assert rope.kind == "yarn", "read_rope lets no other type pass"
    return _yarn(wavelengths, rope, head_dim)


def _llama3(inverse: torch.Tensor, p: dict) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    old_context = p["original_max_position_embeddings"]
    low_wavelength = old_context / p["low_freq_factor"]
    high_wavelength = old_context / p["high_freq_factor"]
    wavelength = 2 * math.pi / inverse
    stretched = torch.where(wavelength > low_wavelength, inverse / p["factor"], inverse)
    width = p["high_freq_factor"] - p["low_freq_factor"]
    smooth = (old_context / wavelength - p["low_freq_factor"]) / width
    between = (1 - smooth) * stretched / p["factor"] + smooth * stretched
    is_between = ~(wavelength < high_wavelength) & ~(wavelength > low_wavelength)
    return torch.where(is_between, between, stretched)


def _yarn(wavelengths: torch.Tensor, rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023): interpolates slow dimensions, keeps fast ones, sharpens attention."""
    p = rope.parameters
    factor = p["factor"]
    old_context = p["original_max_position_embeddings"]

    def dimension_turning(rotations: float) -> float:
        return head_dim * math.log(old_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = dimension_turning(p.get("beta_fast") or 32)
    high = dimension_turning(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    # In this order: `1 / wavelengths / factor` would round otherwise than transformers does.
    frequencies = 1.0 / (factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep

    def magnitude(scale: float, slope: float = 1.0) -> float:
        return 0.1 * slope * math.log(scale) + 1.0 if scale > 1 else 1.0

    attention_factor = p.get("attention_factor")
    if attention_factor is None:
        slope = p.get("mscale")
        slope_all = p.get("mscale_all_dim")
        attention_factor = (
            magnitude(factor, slope) / magnitude(factor, slope_all)
            if slope and slope_all
            else magnitude(factor)
        )
    return frequencies, float(attention_factor)


def rope_table(rope: RopeConfig, head_dim: int, max_positions: int) -> torch.Tensor:
    """Returns float32 `[max_positions, 2, head_dim / 2]`: cos, then sin."""
    inverse, factor = inverse_frequencies(rope, head_dim)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inverse[None, :]
    return torch.stack((angles.cos() * factor, angles.sin() * factor), dim=1)


def rotate(x_THD: torch.Tensor, table_T2R: torch.Tensor) -> torch.Tensor:
    """Rotates in float32 (or wider, if the input is) and rounds once."""
    wide = x_THD if x_THD.dtype == torch.float64 else x_THD.float()
    cos, sin = table_T2R[:, 0].unsqueeze(1).to(wide.dtype), table_T2R[:, 1].unsqueeze(1).to(wide.dtype)
    low, high = wide.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x_THD.dtype)
