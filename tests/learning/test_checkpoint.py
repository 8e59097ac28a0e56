"""Checkpoints: whole or not there, damage is named and set aside, a full disk loses nothing."""

import errno
import json
from fnmatch import fnmatch

import pytest
import torch

from paceline.config import LearningConfig
from paceline.learning import checkpoint as module
from paceline.learning.checkpoint import (
    TrainingState,
    damage,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from paceline.learning.optimiser import MasterAdamW
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder

CONFIG = DecoderConfig("llama", 17, 16, 24, 1, 2, 1, 8, 64)


def make(seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Decoder, MasterAdamW]:
    policy = Decoder(CONFIG, dtype).initialise(seed)
    optimiser = MasterAdamW(policy.named_parameters(), LearningConfig(), 10)
    for _ in range(seed):
        for parameter in policy.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimiser.step()
    return policy, optimiser


def save(folder, step, keep=5):
    policy, optimiser = make(step)
    state = TrainingState(step, optimiser.steps, step * 16, 0.5)
    return (
        save_checkpoint(folder, policy, optimiser, state, tokenizer_from=folder, keep=keep),
        policy,
        optimiser,
    )


def test_checkpoint_round_trip_is_exact(tmp_path):
    path, policy, optimiser = save(tmp_path, 3)
    other, other_optimiser = make(0)
    state = load_checkpoint(path, other, other_optimiser)
    assert state == TrainingState(3, 3, 48, 0.5) and other_optimiser.steps == 3
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), other.parameters(), strict=True))
    restored = other_optimiser.state()
    assert any(name.startswith("master.") for name in restored), (
        "bf16 weights have float32 masters, which must survive"
    )
    assert all(torch.equal(tensor, restored[name]) for name, tensor in optimiser.state().items())


def test_checkpoints_beyond_the_last_k_are_removed(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000003", "step_000004"]


@pytest.mark.parametrize(
    "victim", ["policy/model.safetensors", "optimiser.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("harm", ["truncate", "flip", "delete"])
def test_damaged_checkpoint_is_named_and_set_aside_and_the_previous_one_used(tmp_path, victim, harm):
    save(tmp_path, 1)
    newest, *_ = save(tmp_path, 2)
    file = newest / victim
    content = bytearray(file.read_bytes())
    if harm == "delete":
        file.unlink()
    elif harm == "truncate":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 0x10
        file.write_bytes(content)
    warnings = []
    assert newest_checkpoint(tmp_path, warnings.append).name == "step_000001"
    assert "step_000002" in warnings[0] and (tmp_path / "step_000002.corrupt").is_dir()


@pytest.mark.parametrize(
    "content", ["[]", "null", "5", "{}", '"text"', '["state.json"]', '{"state.json": {}}']
)
def test_manifest_that_lists_nothing_is_damage(tmp_path, content):
    save(tmp_path, 1)
    newest, *_ = save(tmp_path, 2)
    (newest / "manifest.json").write_text(content)
    (newest / "state.json").write_text("{}")  # which nothing else would notice
    warnings = []
    assert newest_checkpoint(tmp_path, warnings.append).name == "step_000001"
    assert "manifest.json does not list" in warnings[0]


@pytest.mark.parametrize(
    "name", ["state.json", "optimiser*.safetensors", "policy/config.json", "policy/*.safetensors"]
)
def test_manifest_without_a_required_file_is_damage(tmp_path, name):
    newest, *_ = save(tmp_path, 1)
    manifest = json.loads((newest / "manifest.json").read_text())
    (newest / "manifest.json").write_text(
        json.dumps({file: mark for file, mark in manifest.items() if not fnmatch(file, name)})
    )
    assert damage(newest) == f"manifest.json does not list {name}"


def test_full_disk_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def no_space(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "save_tensors", no_space)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2)
    assert newest_checkpoint(tmp_path).name == "step_000001" and damage(tmp_path / "step_000001") is None
    monkeypatch.undo()
    save(tmp_path, 2)
    assert newest_checkpoint(tmp_path).name == "step_000002"


def test_checkpoint_does_not_exist_when_killed_before_the_rename(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(module.os, "rename", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000001"]
