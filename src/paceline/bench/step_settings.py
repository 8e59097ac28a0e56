"""The settings that `bench step` compares: what each changes of a recipe whose steps run plainly.

    recipe + overrides ──▶ plain: no drafters, the policy's own precision ──▶ plus the setting's overrides

So the names mean the same whatever the recipe's speculation and precision. The recipe's keys of a part that a
setting uses are kept: the folder of its eagle head (and how a fresh one learns), the layers that FP8 leaves
out.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config import FRESH, Config, ConfigError, changed_keys, load_config
from paceline.config.drafters import DRAFTERS

# Tokens per draft of the settings that always speculate: the best fixed length in NVIDIA's RL runs (arXiv
# 2604.26779).
FIXED_TOKENS = 3

PLAIN = "plain"

_SPECULATION = "rollout.speculation"
_FIXED = (f"{_SPECULATION}.pacing=fixed", f"{_SPECULATION}.tokens={FIXED_TOKENS}")
_PACED = (f"{_SPECULATION}.drafters=[eagle, history]", f"{_SPECULATION}.pacing=adaptive")
_FP8_KV = ("rollout.precision=fp8+kv",)

# What each setting changes of plain steps. A later one for trees, FP8 learning or another drafter goes here.
SETTINGS: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    "history": (f"{_SPECULATION}.drafters=[history]", *_FIXED),
    "eagle": (f"{_SPECULATION}.drafters=[eagle]", *_FIXED),
    "paced": _PACED,
    "fp8": ("rollout.precision=fp8",),
    "kv": ("rollout.precision=kv",),
    "fp8+kv": _FP8_KV,
    "fp8+kv+paced": (*_FP8_KV, *_PACED),
}

# Keys of FP8 rollouts, and what they are where there is no FP8.
_FP8_KEYS = {"base_precision_layers": 0, "kv_scales": "layer"}

# Keys that `bench step` sets or has no use for, with the option that stands for them.
RESERVED_KEYS = {
    "run.steps": "--steps",
    "run.root": "--out",
    "run.name": "--out",
    "report": "nothing: metrics and samples are always kept",
    "checkpoint": "nothing: no checkpoint is written",
    "eval.every": "nothing: the policy is not evaluated",
}

# Keys that every setting must share, or the steps would not be of the same problems and seeds.
COMMON_KEYS = ("task", "run.seed", "rollout.prompts_per_step", "rollout.samples_per_prompt")

# Keys that change how tokens are generated and not which, as the engine promises.
SAME_TOKENS_KEYS = (
    _SPECULATION,
    "rollout.max_running",
    "rollout.kv_tokens",
    "rollout.prefill_tokens",
    "rollout.graph_memory_gb",
)


@dataclass(frozen=True)
class Setting:
    """A named list of overrides on top of plain steps."""

    name: str
    overrides: tuple[str, ...]


def parse_settings(text: str) -> list[Setting]:
    """Reads `plain,paced,mine:paced;rollout.speculation.tokens=5`: known names, and ones defined here."""
    settings = [_parse_setting(part.strip()) for part in _split_outside_brackets(text)]
    names = [setting.name for setting in settings]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ConfigError(f"--settings {text!r}: {repeated[0]!r} is there more than once; name each once")
    return settings


def _parse_setting(text: str) -> Setting:
    name, colon, definition = text.partition(":")
    if not colon:
        return Setting(name, _known(name, "--settings"))
    if name in SETTINGS:
        raise ConfigError(f"--settings {text!r}: {name!r} is taken; call your setting something else")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9+._-]*", name):
        raise ConfigError(
            f"--settings {text!r}: {name!r} names a folder; use letters, digits and any of + . _ -"
        )
    overrides: list[str] = []
    for part in definition.split(";"):
        part = part.strip()
        if "=" in part:
            _refuse(part, RESERVED_KEYS)
            _refuse(part, dict.fromkeys(COMMON_KEYS, "an override for all settings alike"))
            overrides.append(part)
        else:
            overrides += _known(part, f"--settings {text!r}")
    return Setting(name, tuple(overrides))


def _known(name: str, where: str) -> tuple[str, ...]:
    if name not in SETTINGS:
        raise ConfigError(
            f"{where}: there is no setting {name!r}; use one of {', '.join(SETTINGS)}, or define one as "
            "name:section.key=value;section.key=value"
        )
    return SETTINGS[name]


def _split_outside_brackets(text: str) -> list[str]:
    """Splits at commas, but not at those within the lists and mappings of an override."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def refuse_reserved(overrides: Sequence[str]) -> None:
    """Raises where an override for all settings has a key that `bench step` sets itself."""
    for override in overrides:
        _refuse(override, RESERVED_KEYS)


def _refuse(override: str, keys: dict[str, str]) -> None:
    key, _, value = override.partition("=")
    for reserved, instead in keys.items():
        if _lies_in(key, reserved):
            raise ConfigError(f"{key} = {value!r}: not here; `bench step` uses {instead}. Leave it out")


def _lies_in(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def cell_config(
    recipe: str, overrides: Sequence[str], setting: Setting, steps: int, root: Path, name: str
) -> Config:
    """Returns the recipe of one cell, which runs into the folder `name` under `root`."""
    base = load_config(recipe, list(overrides))
    common = [*overrides, *_without_speculation(base)]
    used = load_config(recipe, [*common, *setting.overrides])
    run = [f"run.steps={steps}", f"run.root={json.dumps(str(root))}", f"run.name={json.dumps(name)}"]
    keep_samples = f"report.samples_per_step={used.rollout.prompts_per_step}"
    return load_config(recipe, [*common, *_kept(base, used), *setting.overrides, *run, keep_samples])


def _without_speculation(base: Config) -> list[str]:
    return [
        f"{_SPECULATION}={{}}",
        f"{_SPECULATION}.tokens={base.rollout.speculation.tokens}",
        # Repeats differ by the machine alone then: how much a head learns depends on measured times.
        f"{_SPECULATION}.online.share=0",
        "rollout.precision=base",
        *(f"rollout.{key}={value}" for key, value in _FP8_KEYS.items()),
    ]


def _kept(base: Config, used: Config) -> list[str]:
    """Returns the recipe's overrides of the drafters and the precision that a setting uses."""
    folders = {
        f"{_SPECULATION}.{DRAFTERS[name].folder_key}": getattr(
            base.rollout.speculation, DRAFTERS[name].folder_key
        )
        for name in used.rollout.speculation.drafters
        if DRAFTERS[name].folder_key
    }
    if FRESH in folders.values():  # it drafts nothing that it has not learned in the cell
        folders[f"{_SPECULATION}.online"] = base.rollout.speculation.online.model_dump(exclude_unset=True)
    fp8 = {f"rollout.{key}": getattr(base.rollout, key) for key in _FP8_KEYS}
    if not used.rollout.precision.fp8_weights:
        fp8.pop("rollout.base_precision_layers", None)
    if not used.rollout.precision.fp8_kv:
        fp8.pop("rollout.kv_scales", None)
    return [f"{key}={json.dumps(value)}" for key, value in (folders | fp8).items()]


def same_tokens_promised(plain: Config, other: Config) -> bool:
    """Returns whether two cells must sample the same tokens while their weights agree."""
    changed = changed_keys(plain, other).keys() - {"run.root", "run.name"}
    keeps = all(any(_lies_in(key, same) for same in SAME_TOKENS_KEYS) for key in changed)
    return keeps and other.rollout.speculation.verify == "shared-noise"
