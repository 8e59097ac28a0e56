"""Folders whose weights are quantised: block FP8 is read as the numbers it stands for, the rest is refused.

    X.weight             [N, K]            float8
    X.weight_scale_inv   [N/128, K/128]    one number for each block, rounded up where a block is cut off
    read as              weight * the number of its block

That is what DeepSeek, Qwen and others publish and what transformers calls `quant_method: fp8`. Which modules
are in FP8 follows from the tensors themselves. Other methods store formats that only their own code can read.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# Appended to the name of a weight.
SCALE_SUFFIX = "_scale_inv"
# transformers' `weight_block_size` where the file has none.
DEFAULT_BLOCK = (128, 128)
# Files that quantisers write instead of the key in `config.json`.
QUANTISER_FILES = {
    "quantize_config.json": "GPTQ",
    "quant_config.json": "AWQ",
    "hf_quant_config.json": "ModelOpt",
}
WAY_OUT = (
    "use the folder it was made from, or save it dequantised (transformers: `model.dequantize()`, "
    "`model.save_pretrained`)"
)


@dataclass(frozen=True)
class BlockFp8:
    """How a folder's FP8 weights are scaled."""

    # Rows and columns that share a scale; None: the whole tensor does.
    block: tuple[int, int] | None

    def dequantise(self, name: str, weight_NK: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        scale = _as_float(scale)
        if self.block is None or weight_NK.ndim < 2:
            if scale.numel() != 1:
                raise ValueError(
                    f"{name}{SCALE_SUFFIX} has shape {tuple(scale.shape)}; without a weight_block_size in "
                    "quantization_config it must be one number"
                )
            return weight_NK.float() * scale.reshape(())
        rows, columns = weight_NK.shape[-2:]
        expected = (
            *weight_NK.shape[:-2],
            math.ceil(rows / self.block[0]),
            math.ceil(columns / self.block[1]),
        )
        if tuple(scale.shape) != expected:
            raise ValueError(
                f"{name}{SCALE_SUFFIX} has shape {tuple(scale.shape)}; blocks of {self.block[0]} x "
                f"{self.block[1]} over {tuple(weight_NK.shape)} need {expected}"
            )
        by_row = scale.repeat_interleave(self.block[0], -2)[..., :rows, :]
        return weight_NK.float() * by_row.repeat_interleave(self.block[1], -1)[..., :columns]


def read_quantisation(folder: Path, config: dict[str, Any]) -> BlockFp8 | None:
    """Returns how a folder's weights are quantised, None if they are not; raises for other methods."""
    file = folder / "config.json"
    said = config.get("quantization_config")
    if not said:
        for name, method in QUANTISER_FILES.items():
            if (folder / name).is_file():
                raise ValueError(f"{folder / name}: {method} weights are not supported; {WAY_OUT}")
        return None
    if not isinstance(said, dict):
        raise ValueError(f"{file}: quantization_config = {said!r}: must be an object")
    method = said.get("quant_method")
    if method is None and (said.get("load_in_8bit") or said.get("load_in_4bit")):
        method = "bitsandbytes"
    if method != "fp8":
        raise ValueError(
            f"{file}: quantization_config.quant_method = {method!r} is not supported; supported: 'fp8' "
            f"in blocks; {WAY_OUT}"
        )
    block = said.get("weight_block_size", DEFAULT_BLOCK)
    if block is None:
        return BlockFp8(None)
    are_sizes = isinstance(block, list | tuple) and all(isinstance(n, int) and n > 0 for n in block)
    if not are_sizes or len(block) != 2:
        raise ValueError(
            f"{file}: quantization_config.weight_block_size = {block!r}: must be two sizes, as [128, 128]"
        )
    return BlockFp8((block[0], block[1]))


def _as_float(scale: torch.Tensor) -> torch.Tensor:
    # Exponents of two (`scale_fmt: ue8m0`) that were stored as bytes.
    return torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
