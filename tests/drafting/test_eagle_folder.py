"""Eagle heads in and out of folders, and what is refused. That vLLM opens them is shown in `tests/peers`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.drafting.eagle_folder import load_eagle, save_eagle, stored_dtype
from paceline.drafting.eagle_head import EagleHead, config_for, default_captured_layers
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from tests.drafting.heads import random_head

SHAPE = DecoderConfig("qwen3", 60, 32, 48, 5, 4, 2, 16, 256, qk_norm=True, eos_token_ids=(0,))


@pytest.fixture(scope="module")
def policy() -> Decoder:
    return Decoder(SHAPE).initialise(0)


def make_head(policy: Decoder, draft_vocab: int = 0, dtype: torch.dtype = torch.float32) -> EagleHead:
    head = EagleHead(config_for(policy.config, draft_vocab=draft_vocab), dtype)
    head.draft_to_target.copy_(torch.arange(policy.config.vocab_size)[-head.config.draft_vocab :])
    return random_head(head, policy, 3)


def edit_config(folder: Path, **changes) -> None:
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in raw.items() if value is not ...})
    )


def edit_tensors(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(edit(tensors), folder / "model.safetensors")


def assert_equal(ours: EagleHead, theirs: EagleHead) -> None:
    assert ours.config == theirs.config
    assert torch.equal(ours.draft_to_target, theirs.draft_to_target)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("draft_vocab", [0, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eagle_folder_round_trip(policy, draft_vocab, dtype, tmp_path):
    head = make_head(policy, draft_vocab, dtype)
    save_eagle(head, tmp_path)
    assert_equal(load_eagle(tmp_path, policy, dtype), head)


def test_save_eagle_writes_the_layout_of_both_engines(policy, tmp_path):
    head = make_head(policy, 20)
    save_eagle(head, tmp_path)
    raw, tensors = (
        json.loads((tmp_path / "config.json").read_text()),
        load_file(tmp_path / "model.safetensors"),
    )
    assert (
        raw["architectures"] == ["LlamaForCausalLMEagle3"]
        and raw["model_type"] == "llama"
        and raw["num_hidden_layers"] == 1
    )
    assert raw["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4], "as vLLM counts: what enters a layer"
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3], (
        "as SGLang counts: what leaves a layer"
    )
    assert raw["draft_vocab_size"] == 20 and raw["vocab_size"] == 60 and raw["max_position_embeddings"] == 256
    assert (
        torch.equal(torch.arange(20) + tensors["d2t"], torch.arange(40, 60))
        and tensors["d2t"].dtype == torch.int64
    )
    assert tensors["t2d"].dtype == torch.bool and tensors["t2d"].nonzero().flatten().tolist() == list(
        range(40, 60)
    )
    assert "embed_tokens.weight" not in tensors
    q, k, v = (tensors[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkv")
    assert (
        torch.equal(torch.cat((q, k, v)), head.attention.qkv.weight)
        and q.shape == (64, 64)
        and k.shape == (32, 64)
    )

    save_eagle(make_head(policy), tmp_path)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors")), (
        "vLLM refuses a map of equal vocabularies"
    )


@pytest.mark.parametrize(
    "rename",
    [
        lambda n: n.replace("midlayer.", "layers.0."),
        lambda n: f"model.{n}" if "lm_head" not in n and "d2t" not in n else n,
    ],
    ids=["layers.0", "model."],
)
def test_load_eagle_accepts_other_tensor_names(policy, rename, tmp_path):
    head = make_head(policy, 20)
    save_eagle(head, tmp_path)
    edit_tensors(tmp_path, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})
    assert_equal(load_eagle(tmp_path, policy, torch.float32), head)


def test_load_eagle_reads_a_pickled_head_with_a_copy_of_the_embedding(policy, tmp_path):
    head = make_head(policy)
    save_eagle(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {
        "embed_tokens.weight": policy.embedding.weight.detach().bfloat16()
    }
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert_equal(load_eagle(tmp_path, policy, torch.float32), head)


def test_loaded_head_has_the_policys_positions(policy, tmp_path):
    """Published heads often claim 2048 positions, whatever their policy has."""
    save_eagle(make_head(policy), tmp_path)
    edit_config(tmp_path, max_position_embeddings=64)
    head = load_eagle(tmp_path, policy, torch.float32)
    assert torch.equal(head.rope_table, policy.rope_table) and len(head.rope_table) == 256
    save_eagle(head, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["max_position_embeddings"] == 256


def test_load_eagle_asks_for_layers_where_the_folder_is_ambiguous(policy, tmp_path):
    save_eagle(make_head(policy), tmp_path)
    edit_config(tmp_path, eagle_aux_hidden_state_layer_ids=...)
    with pytest.raises(
        ValueError, match=r"import --layers 0,1,3` takes it as vLLM does, `--layers 1,2,4` as SGLang"
    ):
        load_eagle(tmp_path, policy, torch.float32)
    assert load_eagle(tmp_path, policy, torch.float32, captured_layers=(1, 2, 3)).config.captured_layers == (
        1,
        2,
        3,
    )
    edit_config(tmp_path, eagle_config=...)
    with pytest.raises(ValueError, match="needs a policy of 8 layers or more, not 5"):
        load_eagle(tmp_path, policy, torch.float32)


def test_eagle_folder_can_capture_the_embedding(policy, tmp_path):
    """SGLang captures what enters layer i + 1 for i: only -1 can be the embedding there, and only there -1
    means anything.
    """
    head = EagleHead(config_for(policy.config, captured_layers=(0, 1, 3))).initialise(policy, 3)
    save_eagle(head, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
    assert [i + 1 for i in raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]] == [0, 1, 3]
    assert_equal(load_eagle(tmp_path, policy, torch.float32), head)
    edit_config(tmp_path, eagle_aux_hidden_state_layer_ids=...)
    assert_equal(load_eagle(tmp_path, policy, torch.float32), head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_dtype_of_a_folder(policy, dtype, tmp_path):
    save_eagle(make_head(policy), tmp_path, dtype)
    assert stored_dtype(tmp_path) == dtype


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLMEagle3"),
        ({"norm_before_residual": True}, "norm_before_residual = True is a variant"),
        ({"norm_output": True}, "norm_output = True"),
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc = True"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"num_hidden_layers": 2}, "num_hidden_layers = 2"),
        ({"hidden_size": 64}, "hidden_size is 64, the policy's is 32"),
        ({"target_hidden_size": 64}, "target_hidden_size = 64"),
        ({"vocab_size": 61, "draft_vocab_size": 60}, "vocab_size is 61, the policy's is 60"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, "the policy's last is 4"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 2, 1]}, "increase"),
        ({"draft_vocab_size": 20}, "lm_head.weight has shape"),
        ({"draft_vocab_size": "x"}, "config.json: draft_vocab_size = 'x': must be a whole number"),
        ({"draft_vocab_size": 9.5}, "config.json: draft_vocab_size = 9.5: must be a whole number"),
        ({"architectures": 5}, "architectures = 5; an eagle head has one of"),
        ({"hidden_size": None}, "config.json: hidden_size = None: must be a whole number"),
        (
            {"eagle_aux_hidden_state_layer_ids": ["a"]},
            r"config.json: eagle_aux_hidden_state_layer_ids = \['a'\]: must be a list of layers' numbers",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": 3},
            "config.json: eagle_aux_hidden_state_layer_ids = 3: must be a list",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 0]}, r"config.json: captured layers \(-1, 0\): must be 0"),
        ({"eagle_config": 5}, "config.json: eagle_config = 5: must be an object"),
        (
            {
                "eagle_aux_hidden_state_layer_ids": ...,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": ["a"]},
            },
            r"eagle_config.eagle_aux_hidden_state_layer_ids = \['a'\]: must be a list of layers' numbers",
        ),
    ],
)
def test_load_eagle_refuses_invalid_configurations(policy, changes, message, tmp_path):
    save_eagle(make_head(policy), tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_eagle(tmp_path, policy, torch.float32)


@pytest.mark.parametrize(
    "edit, message",
    [
        (
            lambda t: t | {"embed_tokens.weight": torch.zeros(60, 32)},
            "embed_tokens.weight differs from the policy's",
        ),
        (lambda t: {n: x for n, x in t.items() if n != "fc.weight"}, "lacks the tensor fc.weight"),
        (lambda t: {n: x for n, x in t.items() if n != "d2t"}, "lacks the tensor d2t"),
        (lambda t: t | {"d2t": t["d2t"] + 1}, "a token of its own"),
        (lambda t: t | {"d2t": torch.zeros(20, dtype=torch.int64)}, "disagree"),
        (
            lambda t: t | {"norm.weight": t["norm.weight"] * torch.nan},
            "1 of the head's parameters are not finite, first norm.weight",
        ),
    ],
)
def test_load_eagle_refuses_invalid_tensors(policy, edit, message, tmp_path):
    save_eagle(make_head(policy, 20), tmp_path)
    edit_tensors(tmp_path, edit)
    with pytest.raises(ValueError, match=message):
        load_eagle(tmp_path, policy, torch.float32)


def test_stored_dtype_refuses_a_head_of_integers(policy, tmp_path):
    save_eagle(make_head(policy), tmp_path)
    edit_tensors(tmp_path, lambda t: t | {"fc.weight": t["fc.weight"].int()})
    with pytest.raises(ValueError, match="fc.weight is torch.int32; a quantised head is not supported"):
        stored_dtype(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_load_eagle_names_unreadable_files(policy, name, tmp_path):
    save_eagle(make_head(policy), tmp_path)
    if name == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
    for content in (b"damaged", b"[]"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"^{tmp_path / name}"):
            load_eagle(tmp_path, policy, torch.float32)


def test_load_eagle_refuses_folders_without_a_head(policy, tmp_path):
    with pytest.raises(FileNotFoundError, match="builtin-eagle"):
        load_eagle(tmp_path, policy, torch.float32)
    save_eagle(make_head(policy), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="neither safetensors nor pytorch_model.bin"):
        load_eagle(tmp_path, policy, torch.float32)


@pytest.mark.parametrize(
    "layers, captured",
    [(3, (0, 1, 2)), (4, (1, 2, 3)), (6, (1, 3, 5)), (7, (1, 3, 6)), (8, (2, 4, 5)), (36, (2, 18, 33))],
)
def test_default_captured_layers(layers, captured):
    assert default_captured_layers(layers) == captured


def test_default_captured_layers_of_a_too_shallow_policy():
    with pytest.raises(ValueError, match="such as --layers 0,1"):
        default_captured_layers(2)
