"""Which keys of a recipe `bench rollout` uses.

One that it would ignore is refused: figures that seem to be of another setting are worse than none.
"""

from collections.abc import Sequence

from paceline.config import Config, ConfigError, load_config

POLICY_KEYS = ("policy.path", "policy.dtype")
REQUEST_KEYS = ("task", "rollout.temperature", "rollout.max_tokens")
PRECISION_KEYS = ("rollout.precision", "rollout.base_precision_layers", "rollout.kv_scales")
ENGINE_KEYS = ("max_running", "kv_tokens", "prefill_tokens", "admission", "graph_memory_gb")
ROLLOUT_KEYS = (
    "run.device",
    *POLICY_KEYS,
    *REQUEST_KEYS,
    *PRECISION_KEYS,
    "rollout.deterministic",
    "rollout.speculation",
    *(f"rollout.{key}" for key in ENGINE_KEYS),
)


def rollout_config(recipe: str, overrides: Sequence[str]) -> Config:
    refuse_ignored(overrides)
    config = load_config(recipe, list(overrides))
    if config.policy.lora.path:
        raise ConfigError(
            f"policy.lora.path = {config.policy.lora.path!r}: a rollout's benchmark would leave these "
            "adapters out; measure a folder with merged weights (policy.path), or say policy.lora.path="
        )
    return config


def refuse_ignored(overrides: Sequence[str]) -> None:
    """Raises where an override's key is none of those used, nor lies in one of those sections."""
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or key == "policy.lora.path":
            continue
        if not any(key == one or key.startswith(f"{one}.") for one in ROLLOUT_KEYS):
            raise ConfigError(
                f"{key} = {value!r}: a rollout's benchmark would ignore it; of a recipe it uses "
                f"{', '.join(ROLLOUT_KEYS)}; leave it out"
            )
