"""Makes the drafters that a recipe names (`config/drafters.py`), on the policy's device.

On torch's meta device they are made without weights, which is how `plan/` counts their memory: what is
planned and what runs come from the same lines.
"""

import importlib

from tokenizers import Tokenizer
from torch import nn

from paceline.config import SpeculationConfig
from paceline.config.drafters import DRAFTERS
from paceline.drafting.base import Drafter
from paceline.drafting.recipe import errors_name_recipe_key
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder


def drafter_class(name: str) -> type[Drafter]:
    module, _, attribute = DRAFTERS[name].made_by.partition(":")
    return getattr(importlib.import_module(module), attribute)


def drafter_names(settings: SpeculationConfig, policy: DecoderConfig) -> list[str]:
    """Returns the recipe's drafters, without those that the policy can do without."""
    return [name for name in settings.drafters if drafter_class(name).exists_for(settings, policy)]


def make_drafter(
    name: str, settings: SpeculationConfig, policy: Decoder, tokenizer: Tokenizer | None = None
) -> Drafter:
    """Returns one drafter; `tokenizer` is the policy's, which a drafter may have to share."""
    with errors_name_recipe_key(name, settings):
        return drafter_class(name).of_recipe(settings, policy, tokenizer)


def make_drafters(
    settings: SpeculationConfig, policy: Decoder, tokenizer: Tokenizer | None = None
) -> list[Drafter]:
    return [
        make_drafter(name, settings, policy, tokenizer) for name in drafter_names(settings, policy.config)
    ]


def make_head(settings: SpeculationConfig, policy: Decoder) -> nn.Module | None:
    """Returns a head like the one that drafts and can learn; None: none does."""
    names = (name for name in drafter_names(settings, policy.config) if DRAFTERS[name].learns)
    return next((make_drafter(name, settings, policy).head for name in names), None)
