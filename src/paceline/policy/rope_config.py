"""How rotary frequencies are scaled, read from a Hugging Face `config.json` in the way transformers reads it.

Two generations of keys are in use, and folders have both (`RotaryEmbeddingConfigMixin` of transformers 5):

- `rope_scaling` (with `rope_theta` beside it), where it is not empty, wins over `rope_parameters`;
- the base comes from the dictionary that won, else from `rope_theta` at the top, else it is 10000;
- the context of the pre-training comes from `original_max_position_embeddings` at the top, else from the
  dictionary, else it is `max_position_embeddings`.

Whatever is missing, misspelt or not computed is an error that names the key. `rope.py` does the arithmetic.
"""

import math
from dataclasses import dataclass, field
from typing import Any

DEFAULT_THETA = 10000.0
# Supported values of Hugging Face's `rope_type`, with the numbers that each needs.
REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
OPTIONAL = {"yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")}
ORIGINAL = "original_max_position_embeddings"
# Keys of other scalings, or of none that is supported, with the value that turns each off.
OFF = {"factor": 1.0, "partial_rotary_factor": 1.0, "attn_factor": 1.0, "extrapolation_factor": 1.0}
# Keys that no computation reads.
HARMLESS = ("rope_type", "type", "rope_theta", "finetuned", ORIGINAL)


@dataclass(frozen=True)
class RopeConfig:
    """How rotary frequencies are made."""

    theta: float = DEFAULT_THETA
    # Hugging Face's `rope_type`.
    kind: str = "default"
    # What that type takes besides, under Hugging Face's names.
    parameters: dict[str, Any] = field(default_factory=dict)


def read_rope(config: dict[str, Any], max_positions: int) -> RopeConfig:
    """Reads the RoPE settings of a `config.json`; `max_positions` is the longest context it allows."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    said = config.get(name) or {}
    if not isinstance(said, dict):
        raise ValueError(f"{name} = {said!r}: must be an object")
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind not in REQUIRED:
        raise ValueError(f"{name}: rope_type {kind!r} is not supported; supported: {', '.join(REQUIRED)}")
    _refuse_unknown(said, kind, name)
    theta = _positive("rope_theta", said.get("rope_theta", config.get("rope_theta", DEFAULT_THETA)))
    if kind == "yarn" and theta <= 1:
        raise ValueError(f"rope_theta = {theta:g}: must be more than 1 for yarn")
    found = dict(said)
    if ORIGINAL in REQUIRED[kind]:
        found[ORIGINAL] = config[ORIGINAL] if ORIGINAL in config else said.get(ORIGINAL, max_positions)
        if kind == "yarn" and "factor" in said and said["factor"] is None:
            found["factor"] = max_positions / _positive(ORIGINAL, found[ORIGINAL])
    parameters = {key: _positive(f"{name}.{key}", found.get(key)) for key in REQUIRED[kind]}
    parameters |= {
        key: _positive(f"{name}.{key}", said[key], zero=True)
        for key in OPTIONAL.get(kind, ())
        if said.get(key) is not None
    }
    if kind == "yarn" and "truncate" in said:
        parameters["truncate"] = bool(said["truncate"])
    if kind == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        raise ValueError(
            f"{name}: low_freq_factor = {parameters['low_freq_factor']:g} must be less than "
            f"high_freq_factor = {parameters['high_freq_factor']:g}"
        )
    return RopeConfig(theta, kind, parameters)


def _refuse_unknown(said: dict[str, Any], kind: str, name: str) -> None:
    known = {*HARMLESS, *REQUIRED[kind], *OPTIONAL.get(kind, ()), *(("truncate",) if kind == "yarn" else ())}
    for key, value in said.items():
        if key not in known and value is not None and value != OFF.get(key):
            raise ValueError(
                f"{name}: {key} = {value!r} is not computed for rope_type {kind!r}; "
                "remove the key if it changes nothing"
            )


def _positive(name: str, value: Any, zero: bool = False) -> float | int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} = {value!r}: must be a number, more than 0")
    return value
