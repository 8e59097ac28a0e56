"""Saving into a folder that holds a model: what is read back is what was saved, by every reader."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from paceline.cli.export import export_policy
from paceline.cli.main import app
from paceline.config import ConfigError, LoraConfig
from paceline.models.source import policy_folder
from paceline.policy import model_files
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import exported_tensors, load_policy, save_policy
from paceline.policy.lora import add_adapters, save_adapters
from tests.loop_helpers import make_tiny_policy

SHARD = 8_000


def policy(seed: int, **changes) -> Decoder:
    config = DecoderConfig("llama", 97, 32, 48, 2, 4, 2, 8, 64, **changes)
    return Decoder(config).initialise(seed)


def save(decoder: Decoder, folder: Path, sharded: bool) -> None:
    save_policy(decoder, folder, shard_bytes=SHARD if sharded else 1 << 30)


def assert_is(folder: Path, decoder: Decoder) -> None:
    """The folder holds this model for Paceline and for transformers."""
    expected = dict(exported_tensors(decoder))
    for name, tensor in exported_tensors(load_policy(folder, torch.float32)):
        assert torch.equal(tensor, expected[name]), name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "order", [(True, False), (False, True), (True, False, True), (False, True, False)], ids=str
)
def test_save_policy_replaces_the_model_that_is_read(order, tmp_path):
    for seed, sharded in enumerate(order):
        save(policy(seed), tmp_path, sharded)
        assert_is(tmp_path, policy(seed))
    names = sorted(path.name for path in tmp_path.iterdir())
    if not order[-1]:
        assert names == ["config.json", "model.safetensors"]
    else:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert set(names) == {"config.json", "model.safetensors.index.json", *index["weight_map"].values()}


def test_save_policy_with_fewer_shards_leaves_no_old_ones(tmp_path):
    save_policy(policy(0), tmp_path, shard_bytes=3_000)
    many = {path.name for path in tmp_path.glob("*.safetensors")}
    save_policy(policy(1), tmp_path, shard_bytes=20_000)
    assert not many & {path.name for path in tmp_path.glob("*.safetensors")}
    assert_is(tmp_path, policy(1))


def test_save_policy_removes_other_formats_and_adapters_and_keeps_other_files(tmp_path):
    save(policy(0), tmp_path, sharded=False)
    adapted = policy(0)
    add_adapters(adapted, LoraConfig(rank=2), seed=0)
    save_adapters(adapted, tmp_path, base_model="nowhere")
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "hf_quant_config.json"):
        (tmp_path / name).write_text("old")
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "notes").mkdir()
    save(policy(1), tmp_path, sharded=True)
    assert_is(tmp_path, policy(1))
    assert (tmp_path / "README.md").read_text() == "mine" and (tmp_path / "notes").is_dir()
    for name in (
        "pytorch_model.bin",
        "adapter_config.json",
        "adapter_model.safetensors",
        "hf_quant_config.json",
    ):
        assert not (tmp_path / name).exists()


def test_save_policy_replaces_the_whole_tokenizer(tmp_path):
    source = make_tiny_policy(tmp_path / "source")
    target = tmp_path / "target"
    target.mkdir()
    (target / "chat_template.jinja").write_text("of another model")
    (target / "generation_config.json").write_text('{"eos_token_id": 5}')
    decoder = load_policy(source, torch.float32)
    save_policy(decoder, target, tokenizer_from=source)
    assert not (target / "chat_template.jinja").exists()
    assert load_policy(target, torch.float32).config == decoder.config
    # in place, as after training a folder's own policy
    save_policy(decoder, target, tokenizer_from=target)
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    save_policy(decoder, target)
    assert (target / "tokenizer.json").is_file()


def test_save_policy_that_fails_while_writing_changes_nothing(tmp_path, monkeypatch):
    save(policy(0), tmp_path, sharded=False)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full_disk(tensors, file, metadata):
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_files, "save_file", full_disk)
    with pytest.raises(OSError):
        save(policy(1), tmp_path, sharded=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("stop_after", range(8))
@pytest.mark.parametrize("killed", [False, True], ids=["error", "kill"])
def test_save_policy_cut_short_leaves_no_mix_of_models(killed, stop_after, tmp_path, monkeypatch):
    """After any of its renames: an error puts the old model back, a kill leaves one that no program reads."""
    save(policy(0), tmp_path, sharded=False)
    renames = 0

    def replace(source, target):
        nonlocal renames
        renames += 1
        if renames == stop_after + 1 or (killed and renames > stop_after):
            raise OSError(5, "Input/output error")
        os.rename(source, target)

    monkeypatch.setattr(model_files.os, "replace", replace)
    with pytest.raises(OSError):
        save(policy(1), tmp_path, sharded=True)
    monkeypatch.undo()
    if stop_after == 0 or not killed:
        assert_is(tmp_path, policy(0))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    else:
        with pytest.raises(FileNotFoundError, match="no config.json; a save was cut off, and what it repl"):
            load_policy(tmp_path, torch.float32)
        (aside,) = tmp_path.glob(".saving-*/old")
        assert (aside / "config.json").is_file()
    save(policy(2), tmp_path, sharded=True)
    assert_is(tmp_path, policy(2))
    assert not list(tmp_path.glob(".saving-*"))


def test_save_policy_replaces_links_and_does_not_write_through_them(tmp_path):
    """As in a download cache, where a folder's files lead to ones that others share."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    save(policy(0), blobs, sharded=False)
    folder.mkdir()
    for file in blobs.iterdir():
        (folder / file.name).symlink_to(file)
    assert_is(folder, policy(0))
    save(policy(1), folder, sharded=False)
    assert_is(folder, policy(1))
    assert_is(blobs, policy(0))
    (tmp_path / "link").symlink_to(folder)
    save(policy(2), tmp_path / "link", sharded=True)
    assert_is(folder, policy(2))


def test_saved_weights_have_the_permissions_of_other_files(tmp_path):
    save(policy(0), tmp_path / "one", sharded=False)
    save(policy(0), tmp_path / "many", sharded=True)
    adapted = policy(0)
    add_adapters(adapted, LoraConfig(rank=2), seed=0)
    save_adapters(adapted, tmp_path / "adapter", base_model="nowhere")
    (tmp_path / "plain").write_text("")
    expected = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {expected} and len(files) > 8


def test_adapter_beside_a_model_is_refused(tmp_path):
    """transformers would add it, vLLM would not."""
    save(policy(0), tmp_path, sharded=False)
    adapted = policy(0)
    add_adapters(adapted, LoraConfig(rank=2), seed=0)
    save_adapters(adapted, tmp_path, base_model="nowhere")
    with pytest.raises(ValueError, match="holds an adapter beside a model"):
        load_policy(tmp_path, torch.float32)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match="holds an adapter and no model; .* policy.lora.path"):
        policy_folder(str(tmp_path))


def test_folder_with_two_models_is_refused(tmp_path):
    """As an earlier version left them: transformers reads the one, vLLM the other."""
    save(policy(0), tmp_path, sharded=True)
    save(policy(1), tmp_path / "single", sharded=False)
    os.replace(tmp_path / "single/model.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds two models, model.safetensors and the files"):
        load_policy(tmp_path, torch.float32)
    # an index of the one file is no second model
    for shard in tmp_path.glob("model-*"):
        shard.unlink()
    index = {"weight_map": dict.fromkeys(dict(exported_tensors(policy(1))), "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_is(tmp_path, policy(1))


@pytest.mark.parametrize(
    "file", ["../other/model.safetensors", "/etc/passwd", "..", "sub/x.safetensors", 5, ""]
)
def test_shard_index_that_leaves_its_folder_is_refused(file, tmp_path):
    save(policy(0), tmp_path / "folder", sharded=True)
    save(policy(1), tmp_path / "other", sharded=False)
    index = tmp_path / "folder/model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = file
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{index} lists .*: it must name files of its own folder"):
        load_policy(tmp_path / "folder", torch.float32)


# -- export --------------------------------------------------------------------------------------------


def run_export(*arguments: str):
    return CliRunner().invoke(app, ["export", *arguments])


def test_export_into_a_used_folder_needs_force(tmp_path):
    source, out = make_tiny_policy(tmp_path / "source"), tmp_path / "out"
    save(policy(0), out, sharded=True)
    refused = run_export(str(source), str(out))
    assert isinstance(refused.exception, ValueError)
    assert "is not empty" in str(refused.exception) and "--force" in str(refused.exception)
    assert_is(out, policy(0))
    assert run_export(str(source), str(out), "--force").exit_code == 0
    assert_is(out, load_policy(source, torch.float32))
    (tmp_path / "empty").mkdir()
    assert run_export(str(source), str(tmp_path / "empty")).exit_code == 0
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; choose a folder"):
        export_policy(source, tmp_path / "file", "", force=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_export_writes_the_type_that_is_saved(dtype, tmp_path):
    save_policy(policy(0), tmp_path / "in", dtype=dtype)
    export_policy(tmp_path / "in", tmp_path / "out", "")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == str(dtype).split(".")[1]
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "in" / file).read_bytes()
    export_policy(tmp_path / "in", tmp_path / "wide", "float64")
    assert load_policy(tmp_path / "wide", torch.float64).dtype == torch.float64


def test_export_removes_an_old_adapter(tmp_path):
    """Sharded with an adapter, then a plain single file, then an adapter again."""
    with_adapter = tmp_path / "checkpoint"
    adapted = policy(0)
    add_adapters(adapted, LoraConfig(rank=2), seed=0)
    save_policy(adapted, with_adapter / "policy", shard_bytes=SHARD)
    save_adapters(adapted, with_adapter / "adapter", base_model="nowhere")
    save(policy(1), tmp_path / "plain", sharded=False)
    out = tmp_path / "out"
    for source, has_adapter in ((with_adapter, True), (tmp_path / "plain", False), (with_adapter, True)):
        export_policy(source, out, "", force=True)
        assert (out / "adapter/adapter_config.json").is_file() is has_adapter
        assert (out / "adapter").is_dir() is has_adapter
        assert_is(out, policy(0) if has_adapter else policy(1))


def test_export_does_not_write_over_what_it_reads(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    save(policy(0), checkpoint / "policy", sharded=True)
    save(policy(1), checkpoint / "adapter", sharded=False)
    (tmp_path / "link").symlink_to(checkpoint / "policy")
    before = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    for source, out in (
        (checkpoint, checkpoint),
        (checkpoint, checkpoint / "policy"),
        (checkpoint, checkpoint / "adapter"),
        (checkpoint / "policy", checkpoint / "policy"),
        (checkpoint, tmp_path / "link"),
    ):
        with pytest.raises(ValueError, match=f"OUT {out}: is what is exported; choose another folder"):
            export_policy(source, out, "bfloat16", force=True)
    assert {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("inside", ["", "exported", "checkpoints/step_000004/policy", "samples"])
@pytest.mark.parametrize("kept", [("run.lock",), ("metrics.jsonl",), ("run.lock", "metrics.jsonl")])
def test_export_writes_into_no_run_directory(inside, kept, tmp_path):
    run = tmp_path / "run"
    save(policy(0), run / "checkpoints/step_000004/policy", sharded=False)
    save(policy(0), run / "checkpoints/step_000008/policy", sharded=False)
    for name in ("config.yaml", *kept):
        (run / name).write_text("")
    before = set(run.rglob("*"))
    with pytest.raises(ConfigError, match=f"OUT .*: {run} is a run directory, .* choose a folder outside it"):
        export_policy(run / "checkpoints/step_000008", run / inside, "", force=True)
    assert set(run.rglob("*")) == before
    export_policy(run / "checkpoints/step_000008", tmp_path / "out", "")
    assert_is(tmp_path / "out", policy(0))
