"""Which weights a recipe means: a Hugging Face folder, a shipped policy, or one of these widened to measure.

`policy.widen` is a measuring tool (`widen.py`): the folder's function at a larger shape's cost. This file is
the only place that knows about it; everybody else asks a `PolicySource` for a shape, a policy or its heads.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.config import ConfigError, PolicyConfig
from paceline.drafting.eagle_folder import load_eagle
from paceline.drafting.eagle_head import EagleConfig, EagleHead, config_for
from paceline.drafting.factory import FolderHeads, HeadSource
from paceline.models.widen import load_widened, named_shape, widened_config
from paceline.models.widen_eagle import widen_eagle
from paceline.policy.config import DecoderConfig, read_config
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import DTYPES, load_policy

BUILTIN_POLICY = Path(__file__).parents[1] / "assets" / "builtin"
BUILTIN_POLICIES = {
    "builtin": BUILTIN_POLICY,
    "builtin-moe": BUILTIN_POLICY.with_name("builtin-moe"),
    "builtin-countdown": BUILTIN_POLICY.with_name("builtin-countdown"),
}


@dataclass(frozen=True)
class PolicySource:
    """A policy's folder and, for measurements, the shape it is widened to."""

    folder: Path
    widen: str = ""

    @classmethod
    def of(cls, config: PolicyConfig) -> "PolicySource":
        """Returns the source that a recipe's `policy` section names."""
        return cls(policy_folder(config.path), config.widen)

    @property
    def shape(self) -> DecoderConfig:
        """The configuration of the policy that `load` returns."""
        shape = read_config(self.folder)
        return widened_config(shape, named_shape(self.widen)) if self.widen else shape

    def load(self, dtype: torch.dtype, device: torch.device) -> Decoder:
        """Returns the policy with its weights."""
        if self.widen:
            return load_widened(self.folder, self.widen, dtype, device)
        return load_policy(self.folder, dtype, device)

    @property
    def heads(self) -> HeadSource:
        """Where this policy's eagle heads come from."""
        return WidenedHeads(self.folder) if self.widen else FolderHeads()


@dataclass(frozen=True)
class WidenedHeads:
    """Heads that were trained for a small policy, widened with it."""

    small_folder: Path

    def trained_for(self, policy: DecoderConfig) -> DecoderConfig:
        """Returns the small policy's configuration."""
        return read_config(self.small_folder)

    def config(self, trained: EagleConfig, policy: DecoderConfig) -> EagleConfig:
        """Returns the widened head's configuration; it is assumed to draft over the whole vocabulary."""
        return config_for(policy)

    def load(self, path: str, policy: Decoder) -> EagleHead:
        """Returns the head in `path`, widened to draft for `policy`."""
        small = load_policy(self.small_folder, torch.float32, policy.device)
        return widen_eagle(load_eagle(path, small, torch.float32, policy.device), small.config, policy)


def policy_folder(path: str) -> Path:
    """Returns the folder of a shipped policy's name or a path; raises where there is no policy."""
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
    """Returns the type that a recipe's policy is loaded in on this device."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return DTYPES["bfloat16" if device.type == "cuda" else "float32"]
