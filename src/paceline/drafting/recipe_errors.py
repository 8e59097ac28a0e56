"""Drafters that a recipe names and that cannot be made: the error says which key is to blame, and the way out."""

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.config import ConfigError, SpeculationConfig
from paceline.policy.config import DecoderConfig


@contextmanager
def blame_recipe(name: str, settings: SpeculationConfig) -> Iterator[None]:
    """What goes wrong within is the fault of the folder that the recipe names for this drafter."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, FileNotFoundError) as error:
        key, path, way_out = "draft_model_path", settings.draft_model_path, "use a smaller model with the policy's own tokenizer, "
        if name == "eagle":
            key, path, way_out = "eagle_path", settings.eagle_path, ""
        way_out += f"train an eagle head for this policy with `paceline drafter train`, or leave {name} out of rollout.speculation.drafters"
        raise ConfigError(f"rollout.speculation.{key} = {path!r}: {error}; {way_out}") from None


def check_draft_model(draft: DecoderConfig, policy: DecoderConfig) -> None:
    if draft.vocab_size != policy.vocab_size:
        raise ValueError(f"the draft model has {draft.vocab_size} tokens and the policy {policy.vocab_size}; they must share a tokenizer")
