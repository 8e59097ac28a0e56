"""Folders that are damaged: each error names the file and what is wrong, whatever library found it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.config import ConfigError
from paceline.policy.huggingface import load_policy, save_policy
from paceline.policy.lora import load_adapters
from paceline.policy.tokenizer import load_tokenizer
from paceline.tasks.chat import ChatTemplate
from tests.loop_helpers import make_tiny_policy


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_tiny_policy(tmp_path / "policy")


def edit(file: Path, **changes) -> None:
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize(
    "text, reason",
    [
        ("{nope", "is not readable JSON: Expecting property name"),
        ("", "is not readable JSON"),
        ("[1]", "must hold an object, not a list"),
        ("[" * 100_000, "is not readable JSON: maximum recursion depth"),
    ],
    ids=["no JSON", "nothing", "a list", "deep"],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_invalid_json_is_refused_by_file(folder, name, text, reason):
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=f"^{folder / name} {reason}"):
        load_policy(folder, torch.float32)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"hidden_size": None}, " lacks the key 'hidden_size'"),
        ({"hidden_size": "32"}, ": hidden_size = '32': must be a whole number, 1 or more"),
        ({"num_hidden_layers": 0}, ": num_hidden_layers = 0: must be"),
        ({"num_attention_heads": 0}, ": num_attention_heads = 0: must be"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 2},
            ": num_attention_heads = 3 must be a multiple of num_key_value_heads = 2",
        ),
        ({"max_position_embeddings": -1}, ": max_position_embeddings = -1: must be"),
        ({"eos_token_id": "</s>"}, ": eos_token_id = '</s>': must be one token id"),
        ({"rope_parameters": 5}, ": "),
        ({"model_type": None}, ": model_type '' is not supported"),
    ],
)
def test_impossible_configuration_is_refused_by_file(folder, changes, reason):
    edit(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=f"^{folder / 'config.json'}{reason}"):
        load_policy(folder, torch.float32)


def test_unreadable_tensors_are_refused_by_file(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content in (b"damaged", whole[: len(whole) // 2], b""):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"^{file}: "):
            load_policy(folder, torch.float32)
    file.write_bytes(whole)
    edit(folder / "config.json", intermediate_size=96)
    with pytest.raises(ValueError, match=f"^{folder}: model.layers.0.mlp.gate_proj.weight has shape"):
        load_policy(folder, torch.float32)


def test_shards_that_contradict_the_index_are_refused(folder, tmp_path):
    save_policy(load_policy(folder, torch.float32), tmp_path / "shards", shard_bytes=20_000)
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) > 2
    first, second = shards[0].read_bytes(), shards[1].read_bytes()
    shards[1].write_bytes(first)
    with pytest.raises(ValueError, match=f"^{shards[1]}: .*does not contain"):
        load_policy(tmp_path / "shards", torch.float32)
    shards[1].write_bytes(second[:100])
    with pytest.raises(ValueError, match=f"^{shards[1]}: "):
        load_policy(tmp_path / "shards", torch.float32)
    shards[1].unlink()
    with pytest.raises(
        FileNotFoundError, match=f"lists {shards[1].name}, which {tmp_path / 'shards'} does not hold"
    ):
        load_policy(tmp_path / "shards", torch.float32)
    edit(tmp_path / "shards/model.safetensors.index.json", weight_map=None)
    with pytest.raises(ValueError, match="index.json lacks the key 'weight_map'"):
        load_policy(tmp_path / "shards", torch.float32)


@pytest.mark.parametrize("content", [b"{}", b"{no", b"\xff\xfe\x00"])
def test_invalid_tokenizer_is_refused_by_file(folder, content):
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"^{folder / 'tokenizer.json'} is not a tokenizer: "):
        load_tokenizer(folder)


def test_invalid_tokenizer_settings_are_refused_by_file(folder):
    for text, reason in (("{no", "is not readable JSON"), ("[]", "must hold an object, not a list")):
        (folder / "tokenizer_config.json").write_text(text)
        with pytest.raises(ConfigError, match=f"^{folder / 'tokenizer_config.json'} {reason}"):
            ChatTemplate.from_folder(folder)


def test_damaged_adapters_are_refused_by_file(folder, tmp_path):
    policy = load_policy(folder, torch.float32)
    config, tensors = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    tensors.write_bytes(b"damaged")
    for text, reason in (
        ("[]", " must hold an object"),
        ('{"r": 4}', " lacks the key 'lora_alpha'"),
        ('{"r": null, "lora_alpha": 4}', ": float"),
    ):
        config.write_text(text)
        with pytest.raises(ValueError, match=f"^{config}{reason}"):
            load_adapters(policy, tmp_path)


def test_undamaged_folder_loads(folder):
    """Or none of the above would say anything."""
    loaded = dict(load_policy(folder, torch.float32).named_parameters())
    assert torch.equal(loaded["norm.weight"], load_file(folder / "model.safetensors")["model.norm.weight"])
    load_tokenizer(folder)
