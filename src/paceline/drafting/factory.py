"""Drafters by name, from the recipe."""

from pathlib import Path

import torch
from tokenizers import Tokenizer

from paceline.config import FRESH, SpeculationConfig
from paceline.drafting.base import Drafter
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_folder import load_eagle
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.history import HistoryDrafter
from paceline.drafting.recipe import blame_recipe, draft_model_folder, eagle_head
from paceline.models.widen_eagle import widen_eagle
from paceline.policy.config import read_config
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy


def make_drafter(
    name: str,
    policy: Decoder,
    settings: SpeculationConfig,
    widened_from: Path | None = None,
    tokenizer: Tokenizer | None = None,
) -> Drafter:
    """`widened_from`: the folder of the small policy that `policy` was made from, for which an eagle head was
    trained. `tokenizer`: the policy's, which a draft model must share.
    """
    if name == "history":
        return HistoryDrafter()
    with blame_recipe(name, settings):
        if name == "draft_model":
            return DraftModel(
                load_policy(
                    draft_model_folder(settings, policy.config, tokenizer), policy.dtype, policy.device
                )
            )
        path, config = eagle_head(
            settings,
            policy.config
            if widened_from is None or settings.eagle_path == FRESH
            else read_config(widened_from),
        )
        if path == FRESH:
            return EagleDrafter(EagleHead(config, policy.dtype, policy.device).initialise(policy, seed=0))
        if widened_from is None:
            return EagleDrafter(load_eagle(path, policy, policy.dtype, policy.device))
        small = load_policy(widened_from, torch.float32, policy.device)
        return EagleDrafter(
            widen_eagle(load_eagle(path, small, torch.float32, policy.device), small.config, policy)
        )
