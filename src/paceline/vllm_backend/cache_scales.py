"""Scales of vLLM's FP8 KV cache, which come with the policy's weights as one more tensor (`SCALES`).

    learner   newest texts ──▶ largest |q|, |k|, |v| of each layer ──▶ scales         measured_scales.py
    vLLM      weights ──▶ the model's loader      scales ──▶ its attention layers     here

vLLM takes a checkpoint's scales, and 1 where it has none; neither knows of updates. As a part of the weights
they are measured anew for each version, arrive with it, and a replacement worker receives them too. vLLM has
one scale for all heads of a layer. A drafter's layers keep theirs: what it proposes is verified.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

# The tensor's name among the weights.
SCALES = "paceline.cache_scales"
# What vLLM calls such a cache.
FP8_CACHES = ("fp8", "fp8_e4m3")


def wants_scales(options: Mapping[str, Any]) -> bool:
    """Whether vLLM's options ask for a cache whose scales are ours to set."""
    return options.get("kv_cache_dtype") in FP8_CACHES and not options.get("calculate_kv_scales")


def without_scales(
    weights: Iterable[tuple[str, torch.Tensor]], found: list[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields weights but for the scales, which are added to `found`."""
    for name, tensor in weights:
        if name == SCALES:
            found.append(tensor)
        else:
            yield name, tensor


def set_scales(model: torch.nn.Module, scales_L3: torch.Tensor) -> None:
    """Writes the scales `[layers, 3]` into attention layers, where captured graphs read them."""
    scales = scales_L3.tolist()
    layers = [(name, layer) for name, layer in model.named_modules() if _has_fp8_cache(layer)]
    if not layers:
        raise RuntimeError("vLLM has no attention layer with an FP8 cache to set scales of")
    for name, layer in layers:
        number = re.search(r"\blayers\.(\d+)\.", name)
        if number is None:
            raise RuntimeError(f"vLLM's attention layer {name!r} does not say which layer it is")
        for which, scale in zip("qkv", scales[int(number[1])], strict=True):
            getattr(layer, f"_{which}_scale").fill_(scale)
            setattr(layer, f"_{which}_scale_float", scale)
            host_copy = getattr(layer, f"_{which}_scale_cpu", None)
            if host_copy is not None:
                host_copy.fill_(scale)


def _has_fp8_cache(layer: torch.nn.Module) -> bool:
    return getattr(layer, "kv_cache_dtype", "") in FP8_CACHES and hasattr(layer, "_k_scale")
