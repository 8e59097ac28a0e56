"""Makes the drafters that a recipe names, on the policy's device.

On torch's meta device they are made without weights, which is how `plan/` counts their memory: what is
planned and what runs come from the same lines.
"""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from paceline.config import FRESH, SpeculationConfig
from paceline.drafting.base import Drafter
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_folder import head_for, load_eagle
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.growth import TreeShape, depth_that_pays
from paceline.drafting.history import HistoryDrafter
from paceline.drafting.model_card import read_acceptance
from paceline.drafting.recipe import draft_model_folder, eagle_head, errors_name_recipe_key
from paceline.policy.config import DecoderConfig, read_config
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy


@dataclass(frozen=True)
class DrafterFactory:
    """Makes drafters by the names that a recipe uses."""

    settings: SpeculationConfig
    tokenizer: Tokenizer | None = None  # the policy's, which a draft model must share; None: not compared

    def names(self, policy: DecoderConfig) -> list[str]:
        """Returns the recipe's drafters, without an eagle whose head is `auto` where none fits the policy.

        Completions are the same without it.
        """
        return [
            name
            for name in self.settings.drafters
            if name != "eagle" or head_for(self.settings.eagle_path, policy) is not None
        ]

    def make_all(self, policy: Decoder) -> list[Drafter]:
        return [self.make(name, policy) for name in self.names(policy.config)]

    def make(self, name: str, policy: Decoder) -> Drafter:
        """Returns one drafter on the policy's device; on the meta device, without weights."""
        match name:
            case "history":
                return HistoryDrafter()
            case "draft_model":
                with errors_name_recipe_key(name, self.settings):
                    return self._draft_model(policy)
            case "eagle":
                with errors_name_recipe_key(name, self.settings):
                    return self._eagle(policy)
            case _:
                raise ValueError(f"drafter {name!r}: there are history, draft_model and eagle")

    def _draft_model(self, policy: Decoder) -> DraftModel:
        folder = draft_model_folder(self.settings, policy.config, self.tokenizer)
        if policy.device.type == "meta":
            return DraftModel(Decoder(read_config(folder), policy.dtype, policy.device))
        return DraftModel(load_policy(folder, policy.dtype, policy.device))

    def _eagle(self, policy: Decoder) -> EagleDrafter:
        path, config = eagle_head(self.settings, policy.config)
        fp8 = self.settings.eagle_precision == "fp8"
        if policy.device.type == "meta":
            return EagleDrafter(EagleHead(config, policy.dtype, policy.device), fp8=fp8)
        if path == FRESH:
            head = EagleHead(config, policy.dtype, policy.device).initialise(policy, seed=0)
            return EagleDrafter(head, fp8=fp8)
        head = load_eagle(path, policy, policy.dtype, policy.device)
        return EagleDrafter(head, _deepest(path), fp8)


def _deepest(folder: str) -> int:
    """Returns how deep the trees of a head should be, by what its folder says of its acceptance."""
    measured = read_acceptance(Path(folder))
    return depth_that_pays(measured.accepted_at) if measured is not None else TreeShape.DEEPEST
