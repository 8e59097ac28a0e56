"""Drafters that do not fit the policy: on a CPU, where the engine is made, and on a GPU, where it is planned
first, the recipe's key is named.
"""

import dataclasses
from pathlib import Path

import pytest
import torch

from paceline.config import ConfigError, load_config
from paceline.drafting.eagle_folder import save_eagle
from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.engine.factory import make_engine
from paceline.plan.rollout import rollout_bytes
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import save_policy

SHAPE = DecoderConfig("llama", 50, 32, 64, 3, 2, 1, 16, 128)
OTHERS = {
    "vocab": dataclasses.replace(SHAPE, vocab_size=52),
    "width": dataclasses.replace(SHAPE, hidden_size=64),
    "deep": dataclasses.replace(SHAPE, num_layers=6),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drafters")
    for name, shape in {"fits": SHAPE, **OTHERS}.items():
        policy = Decoder(shape).initialise(0)
        save_policy(policy, folder / name)
        save_eagle(EagleHead(config_for(shape)).initialise(policy, 0), folder / f"eagle-{name}")
    (folder / "damaged").mkdir()
    (folder / "damaged/config.json").write_text("{no")
    return folder


def recipe(drafter: str, path: Path) -> list[str]:
    key = {"eagle": "eagle_path", "draft_model": "draft_model_path"}[drafter]
    return [
        "rollout.max_running=4",
        f"rollout.speculation.drafters=[{drafter}]",
        f"rollout.speculation.{key}={path}",
    ]


@pytest.mark.parametrize(
    "drafter, name, reason",
    [
        ("eagle", "eagle-vocab", "vocab_size is 52, the policy's is 50"),
        ("eagle", "eagle-width", "hidden_size is 64, the policy's is 32"),
        ("eagle", "eagle-deep", "the policy's last is 2"),
        ("eagle", "nowhere", "is not an eagle head's folder"),
        ("eagle", "damaged", "config.json is not readable JSON"),
        ("draft_model", "vocab", "the draft model has 52 tokens and the policy 50"),
        ("draft_model", "damaged", "config.json is not readable JSON"),
    ],
)
def test_wrong_drafter_error_names_the_key_and_the_remedy(folder, drafter, name, reason):
    config = load_config(None, recipe(drafter, folder / name))
    key = "eagle_path" if drafter == "eagle" else "draft_model_path"
    remedy = rf"`paceline drafter train`, or leave {drafter} out of rollout.speculation.drafters"
    said = rf"^rollout.speculation.{key} = '{folder / name}': .*{reason}.*{remedy}$"
    with pytest.raises(ConfigError, match=said):
        make_engine(Decoder(SHAPE).initialise(0), config.rollout, 256, tokenizer=None)
    with pytest.raises(ConfigError, match=said):
        rollout_bytes(Decoder(SHAPE, torch.float32, "meta"), config)


@pytest.mark.parametrize("drafter, name", [("eagle", "eagle-fits"), ("draft_model", "fits")])
def test_fitting_drafters_are_made(folder, drafter, name):
    config = load_config(None, recipe(drafter, folder / name))
    assert (
        make_engine(Decoder(SHAPE).initialise(0), config.rollout, 256, tokenizer=None).drafters[drafter].name
        == drafter
    )
    assert rollout_bytes(Decoder(SHAPE, torch.float32, "meta"), config).drafter > 0
