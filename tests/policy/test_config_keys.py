"""What a `config.json` may say: RoPE as transformers reads it, and no key that passes unread."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from paceline.policy.attention import PackedAttention
from paceline.policy.config import from_huggingface, read_config
from paceline.policy.huggingface import load_policy, save_policy
from paceline.policy.rope import inverse_frequencies
from tests.oracles import FAMILIES, double_precision, small_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "scaling beside parameters": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 777.0},
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
        "rope_theta": 5000.0,
    },
    "scaling beside parameters, no theta at the top": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0},
        "rope_scaling": YARN,
    },
    "scaling with a theta of its own": {"rope_scaling": {**YARN, "rope_theta": 300.0}, "rope_theta": 5000.0},
    "empty scaling": {"rope_parameters": {"rope_theta": 777.0, **YARN}, "rope_scaling": {}},
    "null scaling": {"rope_parameters": {"rope_theta": 777.0, **YARN}, "rope_scaling": None},
    "spelled type": {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 5000.0},
    "both spellings": {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 3.0}},
    "type default": {"rope_scaling": {"type": "default"}, "rope_theta": 5000.0},
    "yarn, original at the top": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "original_max_position_embeddings": 32,
    },
    "yarn, original at the top and inside": {"rope_scaling": YARN, "original_max_position_embeddings": 32},
    "yarn without original": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn, factor null": {"rope_scaling": {**YARN, "factor": None}},
    "yarn, a factor that rounds": {"rope_scaling": {**YARN, "factor": 3.0}},
    "yarn, attention factor": {"rope_scaling": {**YARN, "attention_factor": 1.3}},
    "yarn, mscale": {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}},
    "yarn, betas": {"rope_scaling": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    "yarn, truncate null": {"rope_scaling": {**YARN, "truncate": None}},
    "llama3 without original": {"rope_scaling": LLAMA3},
    "llama3, original at the top": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 32},
    "llama3, original inside": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 48}},
    "nothing": {"rope_parameters": None},
    "theta alone": {"rope_parameters": None, "rope_theta": 123.0},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """One folder of each family; tests change the configuration of a copy."""
    found = {}
    for family in FAMILIES:
        found[family] = tmp_path_factory.mktemp(family)
        small_model(family).save_pretrained(found[family])
    return found


def changed(folder: Path, tmp_path: Path, **changes) -> Path:
    raw = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


def logits(folder: Path, tokens_T: torch.Tensor) -> torch.Tensor:
    policy = load_policy(folder, torch.float64)
    packed = PackedAttention([len(tokens_T)], torch.device("cpu"))
    return policy.logits(policy(tokens_T, packed.positions_T, packed))


def oracle_logits(folder: Path, tokens_T: torch.Tensor) -> torch.Tensor:
    in_double = dict(dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **in_double)
    with double_precision():
        return model(tokens_T[None]).logits[0]


@pytest.mark.parametrize("case", ROPES)
def test_rope_settings_are_read_as_in_transformers(case, folders, tmp_path):
    folder = changed(folders["llama"], tmp_path, **ROPES[case])
    tokens = torch.arange(80) % 97
    expected = oracle_logits(folder, tokens)
    torch.testing.assert_close(logits(folder, tokens), expected, rtol=0, atol=1e-9)
    # and written so that it is read the same again
    save_policy(load_policy(folder, torch.float64), tmp_path / "saved")
    torch.testing.assert_close(oracle_logits(tmp_path / "saved", tokens), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling.factor = None: must be a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, r"rope_scaling.factor = None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, r"rope_scaling.factor = '4'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, r"rope_scaling.factor = 0"),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, r"rope_scaling.factor = None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"rope_scaling.low_freq_factor = None"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, r"low_freq_factor = 4 must be less than"),
        ({"rope_scaling": YARN, "original_max_position_embeddings": None}, r"original_max_.* = None"),
        ({"rope_parameters": {**YARN, "rope_theta": float("nan")}}, r"rope_theta = nan"),
        ({"rope_parameters": None, "rope_theta": None}, r"rope_theta = None"),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"rope_scaling.factor = None"),
        ({"rope_parameters": {**YARN, "rope_theta": 1.0}}, r"rope_theta = 1: must be more than 1 for yarn"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"rope_type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, r"rope_type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "su"}}, r"rope_type 'su' is not supported"),
        ({"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}}, r"mrope_section = \[2, 3, 3\]"),
        ({"rope_scaling": {"factor": 8.0}}, r"factor = 8.0 is not computed for rope_type 'default'"),
        ({"rope_scaling": {**YARN, "attn_factor": 2.0}}, r"attn_factor = 2.0 is not computed"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, r"full_attention = "),
        ({"rope_scaling": [1]}, r"rope_scaling = \[1\]: must be an object"),
    ],
)
def test_unsupported_rope_is_refused_by_name(changes, reason, folders, tmp_path):
    folder = changed(folders["llama"], tmp_path, **changes)
    with pytest.raises(ValueError, match=rf"^{folder / 'config.json'}: .*{reason}"):
        load_policy(folder, torch.float32)


@pytest.mark.parametrize(
    "key, value",
    [
        ("partial_rotary_factor", 0.5),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("attention_multiplier", 0.0078),
        ("logits_scaling", 8.0),
        ("scale_emb", 12),
        ("sliding_window", 16),
        ("no_rope_layers", [1, 0, 1]),
        ("use_qk_norm", True),
        ("qkv_bias", True),
        ("attention_chunk_size", 8192),
        ("is_causal", False),
        ("rope_interleaved", True),
        ("auto_map", {"AutoModelForCausalLM": "modeling.Other"}),
        ("per_layer_config", {"0": {"num_key_value_heads": 1}}),
        ("a_key_of_tomorrow", 0),
    ],
)
def test_unknown_config_key_is_refused_by_name(key, value, folders, tmp_path):
    folder = changed(folders["llama"], tmp_path, **{key: value})
    with pytest.raises(ValueError, match=rf"^{folder / 'config.json'}: {key} = .*not known for llama"):
        read_config(folder)
    # null is a key that is not set
    (tmp_path / "null").mkdir()
    read_config(changed(folders["llama"], tmp_path / "null", **{key: None}))


@pytest.mark.parametrize(
    "family, key, value, reason",
    [
        ("qwen2", "mlp_bias", True, "mlp_bias = True"),
        ("qwen3", "use_sliding_window", True, "sliding-window"),
        ("qwen3", "layer_types", ["full_attention", "sliding_attention", "full_attention"], "sliding-window"),
        ("qwen3_moe", "shared_expert_intermediate_size", 64, "shared_expert_intermediate_size = 64"),
        ("qwen3_moe", "num_experts_per_tok", 9, "num_experts_per_tok = 9 must be at most num_experts = 8"),
        ("llama", "architectures", ["LlamaForSequenceClassification"], "supported: LlamaForCausalLM"),
        ("llama", "tie_word_embeddings", "false", "tie_word_embeddings = 'false': must be true or false"),
        ("llama", "attention_bias", 1, "attention_bias = 1: must be true or false"),
        ("llama", "rms_norm_eps", "1e-5", "rms_norm_eps = '1e-5': must be a number"),
        ("llama", "head_dim", 15, "head_dim = 15: must be even"),
        ("llama", "hidden_act", "gelu", "hidden_act 'gelu' is not supported"),
    ],
)
def test_unsupported_config_values_are_refused(family, key, value, reason, folders, tmp_path):
    folder = changed(folders[family], tmp_path, **{key: value})
    with pytest.raises(ValueError, match=rf"^{folder / 'config.json'}: .*{reason}"):
        read_config(folder)


# The keys of published configurations: SmolLM2, Qwen2.5, Qwen3 and its experts, Llama 3.1, fine-tuned copies.
PUBLISHED = {
    "llama": {
        **{"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
        **{"pretraining_tp": 1, "attention_dropout": 0.0, "use_cache": True, "initializer_range": 0.041},
        **{"_name_or_path": "x", "unsloth_version": "2025.1", "pad_token_id": 2, "torch_dtype": "bfloat16"},
        **{"architectures": ["LlamaForCausalLM"], "bos_token_id": 128000, "mlp_bias": False},
        "eos_token_id": [91, 95, 96],
    },
    "qwen2": {
        **{
            "max_window_layers": 28,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "use_mrope": False,
        },
        **{"attention_dropout": 0.0, "transformers_version": "4.43.1", "torch_dtype": "bfloat16"},
    },
    "qwen3": {"max_window_layers": 36, "sliding_window": None, "use_sliding_window": False},
    "qwen3_moe": {
        **{"router_aux_loss_coef": 0.001, "output_router_logits": False, "decoder_sparse_step": 1},
        **{"max_window_layers": 48, "sliding_window": None, "mlp_only_layers": []},
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_published_config_keys_are_known(family, folders, tmp_path):
    folder = changed(folders[family], tmp_path, **PUBLISHED[family])
    tokens = torch.arange(40)
    torch.testing.assert_close(logits(folder, tokens), oracle_logits(folder, tokens), rtol=0, atol=1e-9)


def test_missing_head_dim_is_as_in_transformers(folders, tmp_path):
    """Qwen3's head dimension is 128 then, not hidden_size / heads."""
    folder = changed(folders["qwen3"], tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    for key in ("head_dim", "max_position_embeddings"):
        del raw[key]
    (folder / "config.json").write_text(json.dumps(raw))
    theirs = transformers.AutoConfig.from_pretrained(folder)
    config = read_config(folder)
    assert config.head_dim == theirs.head_dim == 128
    assert config.max_positions == theirs.max_position_embeddings == 32768


def test_yarn_is_close_to_the_paper():
    """Equation 23 of arXiv 2309.00071 with its own numbers: fast dimensions kept, slow ones divided."""
    from paceline.policy.rope_config import RopeConfig

    plain, _ = inverse_frequencies(RopeConfig(10000.0), 128)
    scaled, factor = inverse_frequencies(
        RopeConfig(10000.0, "yarn", {"factor": 16.0, "original_max_position_embeddings": 4096}), 128
    )
    assert scaled[0] == plain[0] and torch.isclose(scaled[-1], plain[-1] / 16)
    assert factor == pytest.approx(0.1 * 2.772588722239781 + 1)


# -- tensors that the configuration does not account for -----------------------------------------------


def with_tensors(folder: Path, out: Path, **tensors: torch.Tensor) -> Path:
    from safetensors.torch import load_file, save_file

    out.mkdir(exist_ok=True)
    (out / "config.json").write_text((folder / "config.json").read_text())
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(load_file(folder / "model.safetensors") | named, out / "model.safetensors", {"format": "pt"})
    return out


def test_tied_model_with_a_different_head_is_refused_and_a_copy_accepted(tmp_path):
    oracle = small_model("llama", tie_word_embeddings=True)
    oracle.save_pretrained(tmp_path / "tied")
    embedding = oracle.get_input_embeddings().weight.detach()
    same = with_tensors(tmp_path / "tied", tmp_path / "same", lm_head__weight=embedding.clone())
    tokens = torch.arange(20)
    torch.testing.assert_close(logits(same, tokens), logits(tmp_path / "tied", tokens), rtol=0, atol=0)
    for name, head in (("other", embedding + 1), ("shape", embedding[:-1].clone())):
        other = with_tensors(tmp_path / "tied", tmp_path / name, lm_head__weight=head)
        with pytest.raises(ValueError, match="tie_word_embeddings: true, and lm_head.weight is not"):
            load_policy(other, torch.float32)
    raw = json.loads((other / "config.json").read_text()) | {"tie_word_embeddings": False}
    untied = with_tensors(tmp_path / "tied", tmp_path / "untied", lm_head__weight=embedding + 1)
    (untied / "config.json").write_text(json.dumps(raw))
    torch.testing.assert_close(logits(untied, tokens), oracle_logits(untied, tokens), rtol=0, atol=1e-9)


def test_unaccounted_tensors_of_the_model_are_refused(folders, tmp_path):
    bias = {"model__layers__0__self_attn__q_proj__bias": torch.zeros(96)}
    folder = with_tensors(folders["llama"], tmp_path / "bias", **bias)
    with pytest.raises(ValueError, match=r"1 tensors that its config.json does not account for.*q_proj.bias"):
        load_policy(folder, torch.float32)
    harmless = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.zeros(8)}
    load_policy(with_tensors(folders["llama"], tmp_path / "old", **harmless), torch.float32)
    with pytest.warns(UserWarning, match="1 tensors are not used, such as v_head.weight"):
        load_policy(
            with_tensors(folders["llama"], tmp_path / "head", v_head__weight=torch.zeros(4)), torch.float32
        )


def test_fewer_layers_than_the_file_has_warn_and_load(folders, tmp_path):
    folder = changed(folders["llama"], tmp_path, num_hidden_layers=2)
    with pytest.warns(UserWarning, match="tensors of layers beyond num_hidden_layers = 2 are not used"):
        ours = logits(folder, torch.arange(20))
    torch.testing.assert_close(ours, oracle_logits(folder, torch.arange(20)), rtol=0, atol=1e-9)


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "hidden_size"])
def test_absurd_sizes_are_refused_before_memory_is_allocated(key, folders, tmp_path):
    folder = changed(folders["llama"], tmp_path, **{key: 10**12})
    with pytest.raises(ValueError, match=rf"^{folder}(: | lacks)"):
        load_policy(folder, torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_key_is_read_as_transformers_fills_it_in(family):
    """Every key of a configuration is left out once, and read as transformers spells it out then."""
    made = transformers.AutoConfig.for_model(
        family, num_attention_heads=32, hidden_size=4096, num_hidden_layers=2
    )
    whole = json.loads(made.to_json_string())
    required = {"model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"}
    required |= {"num_attention_heads", "moe_intermediate_size", "num_experts_per_tok"}
    differ = []
    for key in sorted(whole.keys() - required):
        given = {k: value for k, value in whole.items() if k != key}
        spelt_out = json.loads(transformers.AutoConfig.for_model(**given).to_json_string())
        try:
            same = from_huggingface(given) == from_huggingface(spelt_out)
        except KeyError:
            continue  # needed here, and said so by `read_config`
        if not same:
            differ.append(key)
    assert not differ


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("token", [-1, 10_000_000])
def test_end_token_outside_the_vocabulary_is_refused(folders, tmp_path, where, token):
    folder = changed(folders["llama"], tmp_path)
    raw = json.loads((folder / where).read_text()) if (folder / where).exists() else {}
    (folder / where).write_text(json.dumps(raw | {"eos_token_id": token}))
    with pytest.raises(ValueError, match=f"eos_token_id = {token}.*outside the vocabulary"):
        read_config(folder)
