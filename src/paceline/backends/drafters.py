"""Drafters by name, from the recipe."""

from pathlib import Path

from paceline.config import ConfigError, SpeculationConfig
from paceline.drafting.base import Drafter
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_folder import load_eagle
from paceline.drafting.history import HistoryDrafter
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy


def make_drafter(name: str, policy: Decoder, settings: SpeculationConfig) -> Drafter:
    if name == "history":
        return HistoryDrafter()
    if name == "eagle":
        return EagleDrafter(load_eagle(settings.eagle_path, policy, policy.dtype, policy.device))
    if not (Path(settings.draft_model_path) / "config.json").is_file():
        raise ConfigError(f"rollout.speculation.draft_model_path = {settings.draft_model_path!r}: must be a Hugging Face folder with a config.json")
    return DraftModel(load_policy(settings.draft_model_path, policy.dtype, policy.device))
