"""Drafters by name, from the recipe."""

from pathlib import Path

import torch

from paceline.config import ConfigError, SpeculationConfig
from paceline.drafting.base import Drafter
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_folder import head_for, load_eagle
from paceline.drafting.history import HistoryDrafter
from paceline.drafting.recipe_errors import blame_recipe, check_draft_model
from paceline.models.widen_eagle import widen_eagle
from paceline.policy.config import read_config
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy


def make_drafter(name: str, policy: Decoder, settings: SpeculationConfig, widened_from: Path | None = None) -> Drafter:
    """`widened_from`: the folder of the small policy that `policy` was made from, for which an eagle head was trained."""
    if name == "history":
        return HistoryDrafter()
    with blame_recipe(name, settings):
        return _make_eagle(policy, settings, widened_from) if name == "eagle" else _make_draft_model(policy, settings)


def _make_eagle(policy: Decoder, settings: SpeculationConfig, widened_from: Path | None) -> Drafter:
    path = head_for(settings.eagle_path, policy.config if widened_from is None else read_config(widened_from))
    if path is None:
        raise ConfigError("rollout.speculation.eagle_path = 'auto': no head is shipped for this policy; make one with `paceline drafter train`")
    if widened_from is None:
        return EagleDrafter(load_eagle(path, policy, policy.dtype, policy.device))
    small = load_policy(widened_from, torch.float32, policy.device)
    return EagleDrafter(widen_eagle(load_eagle(path, small, torch.float32, policy.device), small.config, policy))


def _make_draft_model(policy: Decoder, settings: SpeculationConfig) -> Drafter:
    folder = Path(settings.draft_model_path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"rollout.speculation.draft_model_path = {settings.draft_model_path!r}: must be a Hugging Face folder with a config.json")
    check_draft_model(read_config(folder), policy.config)  # before its weights are loaded
    return DraftModel(load_policy(folder, policy.dtype, policy.device))
