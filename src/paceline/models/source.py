"""Which weights a recipe means: a Hugging Face folder or a shipped policy, and in which type."""

from pathlib import Path

import torch

from paceline.config import ConfigError, PolicyConfig
from paceline.policy.huggingface import DTYPES

BUILTIN_POLICY = Path(__file__).parents[1] / "assets" / "builtin"
BUILTIN_POLICIES = {
    "builtin": BUILTIN_POLICY,
    "builtin-moe": BUILTIN_POLICY.with_name("builtin-moe"),
    "builtin-countdown": BUILTIN_POLICY.with_name("builtin-countdown"),
}


def policy_folder(path: str) -> Path:
    """Resolves a shipped policy's name or a path to a folder; raises if it holds no policy."""
    folder = BUILTIN_POLICIES.get(path, Path(path))
    if not (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"policy.path = {path!r}: {folder} holds an adapter and no model; give the model it belongs to "
            "as policy.path, and this folder as policy.lora.path"
        )
    if not (folder / "config.json").is_file() and (folder / "policy" / "config.json").is_file():
        raise ConfigError(
            f"policy.path = {path!r}: {folder} is a checkpoint of a run; its policy is {folder / 'policy'}"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"policy.path = {path!r}: {folder} is not a Hugging Face folder with a config.json; "
            f"shipped are: {', '.join(BUILTIN_POLICIES)}"
        )
    return folder


def policy_dtype(config: PolicyConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return DTYPES["bfloat16" if device.type == "cuda" else "float32"]
