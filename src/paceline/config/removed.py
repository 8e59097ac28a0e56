"""Removed keys, which recipes and checkpoints of earlier versions still spell out."""

from typing import Any

from paceline.config.section import ConfigError

# For each key the value that asks for today's behaviour, and the error for any other.
REMOVED: dict[str, tuple[Any, str]] = {
    "policy.widen": (
        "",
        "leave it out; `python benchmarks/widen.py POLICY OUT --to 8b --head HEAD HEAD_OUT` writes a widened "
        "policy and its head to folders, for policy.path and rollout.speculation.eagle_path",
    ),
    "policy.lora.dropout": (
        0,
        "leave it out; with dropout the learner's policy would not be the one that sampled",
    ),
    "rollout.speculation.history_versions": (
        0,
        "leave it out; the history drafter keeps responses as long as there is room",
    ),
    "rollout.speculation.step_tokens": (
        0,
        "leave it out; requests that share a step's tokens were slower: each has rollout.speculation.tokens",
    ),
    "rollout.speculation.online.when": (
        "auto",
        "rollout.speculation.online.share says what part of a step's time the head learns for: 0 instead of "
        "never, 0.03 or so instead of always",
    ),
    "rollout.speculation.online.budget": (0.01, "it is rollout.speculation.online.share"),
    **{
        f"rollout.speculation.online.{key}": (
            default,
            "leave it out; rollout.speculation.online.share says how much the head learns",
        )
        for key, default in (("tokens", 8192), ("batch", 16), ("unroll", 5), ("buffer_gb", 0.25))
    },
}


def without_removed_keys(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the sections without removed keys; raises ConfigError where one asks for removed behaviour."""
    kept = {}
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if dotted not in REMOVED:
            kept[key] = without_removed_keys(value, f"{dotted}.") if isinstance(value, dict) else value
        elif value != REMOVED[dotted][0]:
            raise ConfigError(f"{dotted} = {value!r}: there is no such key any more; {REMOVED[dotted][1]}.")
    return kept
