"""Shapes by name and from `config.json`: published sizes, and faults that are named with their key."""

import json
import re

import pytest

from paceline.simulate.model_shape import from_huggingface, load_model

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
DENSE = dict(zip(SIZES, (4096, 32, 32, 8, 32000), strict=True)) | {"intermediate_size": 14336}
SPARSE = DENSE | {"num_local_experts": 8, "num_experts_per_tok": 2}  # Mixtral 8x7B
DEEPSEEK = dict(zip(SIZES, (2048, 28, 16, None, 102400), strict=True)) | {
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize(
    "name, total, active",
    [
        ("qwen3-8b", 8.2e9, 7.6e9),
        ("qwen2.5-7b", 7.6e9, 7.1e9),
        ("qwen2.5-32b", 32.8e9, 32.0e9),
        ("llama-3.3-70b", 70.6e9, 69.5e9),
        ("qwen3-30b-a3b", 30.5e9, 3.0e9),
        ("qwen3-235b-a22b", 235e9, 21.5e9),
    ],
)
def test_built_in_models_have_their_published_sizes(name, total, active):
    model = load_model(name)
    assert model.matrix_parameters == pytest.approx(total, rel=0.02)
    assert model.active_parameters == pytest.approx(active, rel=0.05)


def test_config_json_of_unknown_families_is_read():
    model = from_huggingface("mixtral", SPARSE)
    assert model.matrix_parameters == pytest.approx(46.7e9, rel=0.01)
    assert model.active_parameters == pytest.approx(12.8e9, rel=0.02)
    assert from_huggingface("wrapped", {"text_config": SPARSE}).matrix_parameters == model.matrix_parameters
    with pytest.raises(ValueError, match="kv_lora_rank"):
        from_huggingface("mla", SPARSE | {"kv_lora_rank": 512})
    with pytest.raises(ValueError, match="vocab_size"):
        from_huggingface("cut", {key: value for key, value in SPARSE.items() if key != "vocab_size"})


def test_config_json_with_shared_experts_and_dense_first_layers_is_read():
    """Read as DeepSeek and Qwen2-MoE spell them, which the policy's reader does not know."""
    model = from_huggingface("deepseek-moe-16b", DEEPSEEK)
    assert (model.num_expert_layers, model.shared_intermediate_size) == (27, 2816)
    assert (model.num_kv_heads, model.head_dim) == (16, 128)
    assert model.matrix_parameters == pytest.approx(16.4e9, rel=0.01)
    assert model.active_parameters == pytest.approx(2.6e9, rel=0.02)
    every_second = from_huggingface("sparse-step", DEEPSEEK | {"decoder_sparse_step": 2})
    assert every_second.num_expert_layers == 14
    qwen = {"shared_expert_intermediate_size": 5632, "n_shared_experts": 0}
    assert from_huggingface("qwen2-moe", DEEPSEEK | qwen).shared_intermediate_size == 5632


@pytest.mark.parametrize(
    "config, message",
    [
        (SPARSE | {"num_local_experts": "many"}, "num_local_experts = 'many': must be a whole number"),
        (SPARSE | {"num_local_experts": [8]}, "num_local_experts = [8]: must be a whole number"),
        (SPARSE | {"decoder_sparse_step": "2"}, "decoder_sparse_step = '2': must be a whole number"),
        (SPARSE | {"mlp_only_layers": 3}, "mlp_only_layers = 3: must be a list"),
        (SPARSE | {"first_k_dense_replace": "1"}, "first_k_dense_replace = '1': must be a whole number"),
        (SPARSE | {"n_shared_experts": -2}, "n_shared_experts = -2: must be a whole number"),
        (DENSE | {"intermediate_size": None}, "has no intermediate_size"),
        (DENSE | {"hidden_size": "wide"}, "hidden_size = 'wide': must be a whole number"),
        (DENSE | {"layer_types": ["linear_attention"] * 32}, "linear_attention: only full_attention"),
        ({"text_config": [1]}, "text_config = [1]: must be an object"),
    ],
)
def test_config_json_with_impossible_values_is_named_with_its_key(tmp_path, config, message):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{re.escape(str(file))}.*{re.escape(message)}"):
        load_model(str(tmp_path))


def test_null_keys_are_missing_keys():
    nothing = dict.fromkeys(("n_shared_experts", "head_dim", "first_k_dense_replace", "sliding_window"))
    assert from_huggingface("moe", SPARSE | nothing) == from_huggingface("moe", SPARSE)
