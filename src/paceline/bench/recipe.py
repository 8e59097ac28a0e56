"""Which keys of a recipe a benchmark uses.

One that it would ignore is refused: figures that seem to be of another setting are worse than none.
"""

from collections.abc import Sequence

from paceline.config import Config, ConfigError, load_config
from paceline.drafting.recipe import drafter_overrides

POLICY_KEYS = ("policy.path", "policy.dtype")
REQUEST_KEYS = ("task", "rollout.temperature", "rollout.max_tokens")
ACCEPTANCE_KEYS = ("run.device", *POLICY_KEYS, *REQUEST_KEYS)
PRECISION_KEYS = ("rollout.precision", "rollout.base_precision_layers", "rollout.kv_scales")
# Keys that change what is measured wherever they are set, in a recipe's file too.
JUDGED_BY_VALUE = ("rollout.precision", "policy.lora.path")
# The folders of rollout.speculation are checked by `drafter_overrides`.
SPECULATION_KEYS = (*ACCEPTANCE_KEYS, *PRECISION_KEYS, "rollout.deterministic", "rollout.speculation")
ENGINE_KEYS = ("max_running", "kv_tokens", "prefill_tokens", "admission", "graph_memory_gb")
ROLLOUT_KEYS = (*SPECULATION_KEYS, *(f"rollout.{key}" for key in ENGINE_KEYS))


def acceptance_config(recipe: str, overrides: Sequence[str]) -> Config:
    """Reads the recipe of `bench acceptance`."""
    refuse_ignored(overrides, ACCEPTANCE_KEYS, "acceptance")
    config = load_config(recipe, list(overrides))
    _refuse_precision(config, "acceptance")
    _refuse_adapters(config, "acceptance")
    return config


def speculation_config(recipe: str, overrides: Sequence[str], drafter: str) -> Config:
    """Reads the recipe of `bench speculation`, whose own options say who drafts."""
    refuse_ignored(overrides, SPECULATION_KEYS, "speculation")
    config = load_config(recipe, drafter_overrides(list(overrides), [drafter]))
    _refuse_adapters(config, "speculation")
    return config


def rollout_config(recipe: str, overrides: Sequence[str], command: str) -> Config:
    """Reads the recipe of `bench rollout` or `bench pacing`."""
    refuse_ignored(overrides, ROLLOUT_KEYS, command)
    config = load_config(recipe, list(overrides))
    _refuse_adapters(config, command)
    return config


def refuse_ignored(overrides: Sequence[str], used: Sequence[str], command: str) -> None:
    """Raises where an override's key is none of those used, nor lies in one of those sections."""
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or key in JUDGED_BY_VALUE:
            continue
        if not any(key == one or key.startswith(f"{one}.") for one in used):
            raise ConfigError(
                f"{key} = {value!r}: `bench {command}` would ignore it; of a recipe it uses "
                f"{', '.join(used)}; leave it out"
            )


def _refuse_precision(config: Config, command: str) -> None:
    rollout = config.rollout
    if not rollout.is_default("precision"):
        base = type(rollout).model_fields["precision"].default
        raise ConfigError(
            f"rollout.precision = {str(rollout.precision)!r}: `bench {command}` measures in the policy's own "
            f"type only; say rollout.precision={base} for that, or measure steps and whole rollouts with "
            f"`bench decode` and `bench rollout --precision {rollout.precision}`"
        )


def _refuse_adapters(config: Config, command: str) -> None:
    if config.policy.lora.path:
        raise ConfigError(
            f"policy.lora.path = {config.policy.lora.path!r}: `bench {command}` would leave these adapters "
            "out; measure a folder with merged weights (policy.path), or say policy.lora.path="
        )
