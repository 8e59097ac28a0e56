"""What a recipe names for its drafters: folders, and whether they go with the policy. Errors name the recipe's key."""

from pathlib import Path

from tokenizers import Tokenizer

from paceline.config import ConfigError, SpeculationConfig, blaming
from paceline.drafting.eagle_folder import head_for, read_eagle_config
from paceline.drafting.eagle_head import EagleConfig
from paceline.policy.config import DecoderConfig, read_config
from paceline.policy.tokenizer import differing_tokens, load_tokenizer

EAGLE_KEY, DRAFT_MODEL_KEY = "rollout.speculation.eagle_path", "rollout.speculation.draft_model_path"


def available_drafters(settings: SpeculationConfig, policy: DecoderConfig) -> list[str]:
    """The recipe's drafters, without an eagle whose head is `auto` where none fits: results are the same without it."""
    return [name for name in settings.drafters if name != "eagle" or head_for(settings.eagle_path, policy) is not None]


def eagle_head(settings: SpeculationConfig, policy: DecoderConfig) -> tuple[str, EagleConfig]:
    """The folder, or the name of a shipped head, and what its configuration says."""
    path = head_for(settings.eagle_path, policy)
    if path is None:
        raise ConfigError(f"{EAGLE_KEY} = 'auto': no head is shipped for this policy; make one with `paceline drafter train`")
    with blaming(EAGLE_KEY, settings.eagle_path):
        return path, read_eagle_config(path, policy)


def draft_model_folder(settings: SpeculationConfig, policy: DecoderConfig, tokenizer: Tokenizer | None = None) -> Path:
    """Checked against the policy: an id must mean the same to both. Without the two tokenizers only their sizes can be compared."""
    folder, named = Path(settings.draft_model_path), f"{DRAFT_MODEL_KEY} = {settings.draft_model_path!r}"
    if not settings.draft_model_path or not (folder / "config.json").is_file():
        raise ConfigError(f"{named}: must be a Hugging Face folder with a config.json")
    other = "name a model with the policy's tokenizer, or take draft_model out of rollout.speculation.drafters"
    with blaming(DRAFT_MODEL_KEY, settings.draft_model_path):
        size = read_config(folder).vocab_size
    if size != policy.vocab_size:
        raise ConfigError(f"{named}: it has {size} tokens and the policy {policy.vocab_size}; {other}")
    if tokenizer is not None and (folder / "tokenizer.json").is_file():
        differing = differing_tokens(tokenizer, load_tokenizer(folder))
        if differing:
            number, (ours, theirs) = next(iter(differing.items()))
            example = f"{number} is {theirs!r} to it and {ours!r} to the policy"
            raise ConfigError(f"{named}: its tokenizer is another one, {len(differing)} ids mean something else ({example}); {other}")
    return folder
