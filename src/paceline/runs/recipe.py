"""Checks that a resumed run still has the recipe it began with.

`config.yaml` in the run directory can be truncated or edited. Each checkpoint has a copy that its manifest
covers: the resumed recipe is compared with that.
"""

import shlex
from pathlib import Path
from typing import Any

import yaml

from paceline.config import RESUME_MAY_CHANGE, Config, ConfigError, changed_keys, flat_keys, load_config
from paceline.learning.checkpoint import CONFIG_FILE
from paceline.report.run_directory import RunDirectory


def check_recipe(run: RunDirectory, checkpoint: Path | None, config: Config) -> None:
    """Raises ConfigError where `config` would continue the run as something else."""
    _refuse_changes(run, changed_keys(run.config(), config), "")
    if checkpoint is None or not (checkpoint / CONFIG_FILE).is_file():
        return  # checkpoints of earlier versions have no copy
    saved = checkpoint / CONFIG_FILE
    restore = f"cp {shlex.quote(str(saved))} {shlex.quote(str(run.config_path))}"
    way_out = f" {run.config_path} is not what this run was trained with; restore it with: {restore}"
    saved_config = load_config(str(saved))  # without keys of earlier versions, which a rewritten recipe lacks
    known = flat_keys(_tree(saved)) & flat_keys(saved_config.model_dump())
    lost = sorted(known - flat_keys(_tree(run.config_path)))
    if lost:
        listing = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
        raise ConfigError(f"{run.config_path} has lost the keys {listing}.{way_out}")
    _refuse_changes(run, changed_keys(saved_config, config), way_out)


def _refuse_changes(run: RunDirectory, changed: dict[str, tuple[Any, Any]], way_out: str) -> None:
    refused = {key: values for key, values in changed.items() if key not in RESUME_MAY_CHANGE}
    if refused:
        listing = "; ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in refused.items())
        raise ConfigError(
            f"{run.path} cannot resume with changed keys ({listing}). "
            f"Allowed to change: {', '.join(RESUME_MAY_CHANGE)}.{way_out}"
        )


def _tree(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text()) or {}
