"""Keys that recipes and checkpoints of earlier versions spell out, and that no recipe has today."""

from typing import Any

from paceline.config.section import ConfigError

# Of each key the value that asks for what every run does now, and what to say to any other.
REMOVED: dict[str, tuple[Any, str]] = {
    "policy.lora.dropout": (
        0,
        "leave it out; with dropout the learner's policy would not be the one that sampled",
    ),
    "rollout.speculation.history_versions": (
        0,
        "leave it out; the history drafter keeps responses as long as there is room",
    ),
}


def without_removed_keys(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the sections without removed keys; raises ConfigError where one asks for what is gone."""
    kept = {}
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if dotted not in REMOVED:
            kept[key] = without_removed_keys(value, f"{dotted}.") if isinstance(value, dict) else value
        elif value != REMOVED[dotted][0]:
            raise ConfigError(f"{dotted} = {value!r}: there is no such key any more; {REMOVED[dotted][1]}.")
    return kept
