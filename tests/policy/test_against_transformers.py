"""Logits and gradients of every family equal transformers', and folders travel both ways."""

import json

import pytest
import torch
import transformers

from paceline.policy.attention import PackedAttention
from paceline.policy.config import from_huggingface
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import exported_tensors, layout, load_policy, save_policy
from tests.oracles import SMALL, double_precision, small_model

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip
CASES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 6}),
    "llama-linear": ("llama", {"rope_parameters": ROPES["linear"]}),
    "llama-llama3": ("llama", {"rope_parameters": ROPES["llama3"]}),
    "llama-yarn": ("llama", {"rope_parameters": ROPES["yarn"]}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn-tied": ("qwen2", {"rope_parameters": ROPES["yarn"], "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "rope_parameters": ROPES["default"]}),
}


@pytest.fixture(autouse=True)
def oracle_in_double():
    with double_precision():
        yield


def make_oracle(case: str) -> transformers.PreTrainedModel:
    family, changes = CASES[case]
    return small_model(family, **changes)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients(case, tmp_path):
    oracle = make_oracle(case)
    oracle.save_pretrained(tmp_path)
    policy = load_policy(tmp_path, torch.float64)
    lengths = [7, 100, 1]
    sequences = [torch.randint(0, 97, (n,)) for n in lengths]
    packed = PackedAttention(lengths, torch.device("cpu"))
    ours = policy.logits(policy(torch.cat(sequences), packed.positions_T, packed))
    theirs = torch.cat([oracle(sequence[None]).logits[0] for sequence in sequences])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)

    weights = torch.randn_like(ours)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    gradients = dict(policy.named_parameters())
    oracle_gradients = dict(oracle.named_parameters())
    for name, piece in layout(policy.config).items():
        gradient = gradients[piece.parameter].grad[piece.start : piece.stop]
        torch.testing.assert_close(gradient, oracle_gradients[name].grad, rtol=1e-7, atol=1e-7, msg=name)


@pytest.mark.parametrize("case", ["llama-biases", "llama-llama3", "qwen2-yarn-tied", "qwen3"])
def test_saved_folder_opens_in_transformers(case, tmp_path):
    make_oracle(case).save_pretrained(tmp_path / "in")
    policy = load_policy(tmp_path / "in", torch.float64)
    save_policy(policy, tmp_path / "out", shard_bytes=40_000)
    assert (tmp_path / "out/model.safetensors.index.json").is_file(), "this size must shard"
    again = load_policy(tmp_path / "out", torch.float64)
    for (name, a), (_, b) in zip(exported_tensors(policy), exported_tensors(again), strict=True):
        assert torch.equal(a, b), name
    assert again.config == policy.config

    tokens = torch.randint(0, 97, (1, 70))
    reopened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64, attn_implementation="sdpa")
    packed = PackedAttention([70], torch.device("cpu"))
    ours = policy.logits(policy(tokens[0], packed.positions_T, packed))
    torch.testing.assert_close(ours, reopened(tokens).logits[0], rtol=0, atol=1e-9)


def test_activation_checkpointing_changes_nothing():
    gradients = []
    for checkpointing in (False, True):
        policy = Decoder(from_huggingface({"model_type": "qwen3", **SMALL})).initialise(0)
        policy.activation_checkpointing = checkpointing
        packed = PackedAttention([9, 4], torch.device("cpu"))
        policy.logits(policy(torch.arange(13), packed.positions_T, packed)).pow(2).sum().backward()
        gradients.append([p.grad for p in policy.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_parameter_count():
    for case in CASES:
        config = from_huggingface(make_oracle(case).config.to_dict())
        assert config.num_parameters == sum(p.numel() for p in Decoder(config).parameters()), case


def test_unsupported_models_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="gpt2.*supported families: llama, qwen2, qwen3"):
        from_huggingface({"model_type": "gpt2"})
    with pytest.raises(ValueError, match="sliding-window"):
        from_huggingface({"model_type": "qwen2", "use_sliding_window": True, **SMALL})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        load_policy(tmp_path, torch.float32)
