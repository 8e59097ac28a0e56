"""What a recipe names for its drafters is checked against the policy, and errors name the recipe's key."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from paceline.config import Config, ConfigError, SpeculationConfig, load_config
from paceline.config.drafters import DRAFTERS, NATIVE
from paceline.drafting.factory import drafter_class, make_drafter
from paceline.drafting.growth import TreeShape, depth_that_pays
from paceline.drafting.model_card import MeasuredAcceptance, write_card
from paceline.models.source import BUILTIN_POLICY
from paceline.plan.rollout import rollout_bytes
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy, save_policy
from paceline.policy.tokenizer import (
    EOS,
    character_tokenizer,
    differing_tokens,
    load_tokenizer,
    save_tokenizer,
)
from paceline.session import make_backend
from paceline.tasks.running_sums import ALPHABET

POLICY = load_policy(BUILTIN_POLICY, torch.float32)


def draft_folder(folder: Path, alphabet: str = ALPHABET, vocab_size: int = POLICY.config.vocab_size) -> Path:
    save_policy(
        Decoder(dataclasses.replace(POLICY.config, num_layers=1, vocab_size=vocab_size)).initialise(0), folder
    )
    save_tokenizer(character_tokenizer(alphabet), folder)
    return folder


def recipe(drafter: str, path: Path | str) -> Config:
    key = {"eagle": "eagle_path", "draft_model": "draft_model_path"}[drafter]
    return load_config(
        None, [f"rollout.speculation.drafters=[{drafter}]", f"rollout.speculation.{key}={path}"]
    )


def open_backend(config: Config) -> None:
    make_backend(POLICY, load_tokenizer(BUILTIN_POLICY), config).close()


def plan(config: Config) -> None:
    """On a GPU this comes first."""
    rollout_bytes(Decoder(POLICY.config, torch.float32, "meta"), config)


@pytest.mark.parametrize("use", [open_backend, plan])
@pytest.mark.parametrize(
    "drafter, path, message",
    [
        (
            "eagle",
            "/nowhere",
            "rollout.speculation.eagle_path = '/nowhere': '/nowhere' is not an eagle head's folder",
        ),
        ("eagle", BUILTIN_POLICY, f"rollout.speculation.eagle_path = '{BUILTIN_POLICY}': "),
        (
            "draft_model",
            "/nowhere",
            "rollout.speculation.draft_model_path = '/nowhere': must be a Hugging Face folder",
        ),
        ("draft_model", "", "rollout.speculation.draft_model_path = '': must be a Hugging Face folder"),
    ],
)
def test_drafter_folders_that_do_not_exist_are_refused(use, drafter, path, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        use(recipe(drafter, path))


@pytest.mark.parametrize("use", [open_backend, plan])
def test_draft_model_of_another_vocabulary_size_is_refused(use, tmp_path):
    folder = draft_folder(tmp_path, ALPHABET + "!?", POLICY.config.vocab_size + 2)
    size = POLICY.config.vocab_size
    message = (
        f"rollout.speculation.draft_model_path = '{folder}': "
        f"the draft model has {size + 2} tokens and the policy {size}"
    )
    with pytest.raises(
        ConfigError, match=re.escape(message) + ".*use a smaller model with the policy's own tokenizer"
    ):
        use(recipe("draft_model", folder))


def test_draft_model_of_another_tokenizer_of_the_same_size_is_refused(tmp_path):
    """It would draft, and never be right."""
    open_backend(recipe("draft_model", draft_folder(tmp_path / "same")))
    other = draft_folder(tmp_path / "other", ALPHABET[1] + ALPHABET[0] + ALPHABET[2:])
    with pytest.raises(
        ConfigError,
        match=r"draft_model_path = .*2 ids mean something else \(1 is '.' to it and '.' to the policy\)",
    ):
        open_backend(recipe("draft_model", other))
    (other / "tokenizer.json").unlink()
    open_backend(recipe("draft_model", other))  # nothing available to compare


def test_damaged_head_is_named(tmp_path):
    for file in (BUILTIN_POLICY.with_name("builtin-eagle")).iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(
        ConfigError, match=f"rollout.speculation.eagle_path = '{tmp_path}': .*neither safetensors"
    ):
        make_drafter("eagle", SpeculationConfig(drafters=["eagle"], eagle_path=str(tmp_path)), POLICY)


def test_eagle_trees_are_as_deep_as_the_folders_acceptance_pays(tmp_path):
    for file in (BUILTIN_POLICY.with_name("builtin-eagle")).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())

    def deepest():
        settings = SpeculationConfig(drafters=["eagle"], eagle_path=str(tmp_path))
        return make_drafter("eagle", settings, POLICY).deepest

    assert deepest() == TreeShape.DEEPEST, "nothing is said"
    measured = MeasuredAcceptance("p", "t", 1.0, 0, 100, 1.5, 0.4, (0.4, 0.1, 0.0))
    write_card(tmp_path, None, measured)
    assert deepest() == depth_that_pays(measured.accepted_at) < TreeShape.DEEPEST
    (tmp_path / "acceptance.json").write_text('{"last": {"accepted_at": ["much"]}}')
    assert deepest() == TreeShape.DEEPEST, "nothing that can be read"


def test_renamed_reserved_tokens_do_not_make_another_tokenizer():
    ours, theirs = character_tokenizer("abc"), character_tokenizer("abd")
    assert differing_tokens(ours, theirs) == {3: ("c", "d")}
    theirs.add_special_tokens(["d"])
    assert differing_tokens(ours, theirs) == {} and differing_tokens(theirs, ours) == {}
    assert differing_tokens(ours, character_tokenizer("abcd")) == {4: (None, "d")}
    assert EOS in ours.get_vocab()


@pytest.mark.parametrize("name", NATIVE)
def test_registered_drafters_go_by_their_recipe_name_and_name_keys_of_the_recipe(name):
    """Statistics and checkpoints have the drafter's own name."""
    assert drafter_class(name).name == name
    assert {*DRAFTERS[name].keys} <= {*SpeculationConfig.model_fields}
