"""Makes the drafters that a recipe names, on the policy's device.

On torch's meta device they are made without weights, which is how `plan/` counts their memory: what is
planned and what runs come from the same lines.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from paceline.config import FRESH, SpeculationConfig
from paceline.drafting.base import Drafter
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_folder import head_for, load_eagle
from paceline.drafting.eagle_head import EagleConfig, EagleHead
from paceline.drafting.growth import TreeShape, depth_that_pays
from paceline.drafting.history import HistoryDrafter
from paceline.drafting.merged import MergedDrafter
from paceline.drafting.model_card import read_acceptance
from paceline.drafting.recipe import draft_model_folder, eagle_head, errors_name_recipe_key
from paceline.policy.config import DecoderConfig, read_config
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy


class HeadSource(Protocol):
    """Resolves EAGLE-3 head folders for a policy; widened models adapt a small model's head."""

    def trained_for(self, policy: DecoderConfig) -> DecoderConfig:
        """Returns the configuration of the policy that the heads in folders were trained for."""

    def config(self, trained: EagleConfig, policy: DecoderConfig) -> EagleConfig:
        """Returns the configuration that a head has once it drafts for `policy`."""

    def load(self, path: str, policy: Decoder) -> EagleHead:
        """Returns the head in `path`, ready to draft for `policy`."""


class FolderHeads:
    """Heads that were trained for the policy itself."""

    def trained_for(self, policy: DecoderConfig) -> DecoderConfig:
        """Returns the policy's own configuration."""
        return policy

    def config(self, trained: EagleConfig, policy: DecoderConfig) -> EagleConfig:
        """Returns the head's configuration as its folder has it."""
        return trained

    def load(self, path: str, policy: Decoder) -> EagleHead:
        """Returns the head in `path` with its weights."""
        return load_eagle(path, policy, policy.dtype, policy.device)


@dataclass(frozen=True)
class DrafterFactory:
    """Makes drafters by the names that a recipe uses."""

    settings: SpeculationConfig
    heads: HeadSource = FolderHeads()
    tokenizer: Tokenizer | None = None  # the policy's, which a draft model must share; None: not compared

    def names(self, policy: DecoderConfig) -> list[str]:
        """Returns the recipe's drafters, without an eagle whose head is `auto` where none fits the policy.

        Completions are the same without it.
        """
        trained_for = self.heads.trained_for(policy)
        return [
            name
            for name in self.settings.drafters
            if name != "eagle" or head_for(self.settings.eagle_path, trained_for) is not None
        ]

    def make_all(self, policy: Decoder) -> list[Drafter]:
        """Returns every drafter of the recipe that fits this policy, and the two that make trees together."""
        made = {name: self.make(name, policy) for name in self.names(policy.config)}
        drafters = list(made.values())
        history, eagle = made.get("history"), made.get("eagle")
        together = self.settings.shape == "tree" and self.settings.pacing == "adaptive"
        if together and isinstance(history, HistoryDrafter) and isinstance(eagle, EagleDrafter):
            drafters.append(MergedDrafter(history, eagle))
        return drafters

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
        fresh = self.settings.eagle_path == FRESH
        trained_for = policy.config if fresh else self.heads.trained_for(policy.config)
        path, config = eagle_head(self.settings, trained_for)
        fp8 = self.settings.eagle_precision == "fp8"
        if policy.device.type == "meta":
            fitted = config if fresh else self.heads.config(config, policy.config)
            return EagleDrafter(EagleHead(fitted, policy.dtype, policy.device), fp8=fp8)
        if fresh:
            head = EagleHead(config, policy.dtype, policy.device).initialise(policy, seed=0)
            return EagleDrafter(head, fp8=fp8)
        return EagleDrafter(self.heads.load(path, policy), _deepest(path), fp8)


def _deepest(folder: str) -> int:
    """Returns how deep the trees of a head should be, by what its folder says of its acceptance."""
    measured = read_acceptance(Path(folder))
    return depth_that_pays(measured.accepted_at) if measured is not None else TreeShape.DEEPEST
