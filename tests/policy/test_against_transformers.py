"""Logits and gradients of every family equal transformers', and folders travel both ways."""

import dataclasses
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from paceline.policy.attention import PackedAttention
from paceline.policy.config import DecoderConfig, from_huggingface
from paceline.policy.decoder import Decoder
from paceline.policy.fused import EVERYTHING, Recompute
from paceline.policy.huggingface import exported_tensors, layout, load_policy, save_policy
from paceline.policy.shapes import SHAPES
from tests.oracles import EXPERTS, SMALL, double_precision, small_model

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
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
    "moe": ("qwen3_moe", {}),
    "moe-plain-weights-tied": ("qwen3_moe", {"norm_topk_prob": False, "tie_word_embeddings": True}),
    "moe-dense-layer": ("qwen3_moe", {"mlp_only_layers": [1], "attention_bias": True}),
    "moe-every-second-layer": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]},
    ),
    "moe-idle-experts": ("qwen3_moe", {"num_experts": 64, "num_experts_per_tok": 1, "norm_topk_prob": False}),
    "moe-yarn": ("qwen3_moe", {"rope_parameters": ROPES["yarn"], "num_experts_per_tok": 8}),
}


@pytest.fixture(autouse=True)
def oracle_in_double():
    with double_precision():
        yield


def make_oracle(case: str) -> transformers.PreTrainedModel:
    family, changes = CASES[case]
    return small_model(family, **changes)


def oracle_gradient(name: str, parameters: dict[str, torch.nn.Parameter]) -> torch.Tensor:
    """transformers keeps a layer's experts in one tensor, gate above up, but writes them one by one."""
    if name in parameters:
        return parameters[name].grad
    layer, expert, projection, _ = name.rsplit(".", 3)
    if projection == "down_proj":
        return parameters[f"{layer}.down_proj"].grad[int(expert)]
    return parameters[f"{layer}.gate_up_proj"].grad[int(expert)].chunk(2)[projection == "up_proj"]


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(case, tmp_path):
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
        gradient = piece.of(gradients[piece.parameter].grad)
        torch.testing.assert_close(
            gradient, oracle_gradient(name, oracle_gradients), rtol=1e-7, atol=1e-7, msg=name
        )


@pytest.mark.parametrize(
    "case", ["llama-biases", "llama-llama3", "qwen2-yarn-tied", "qwen3", "moe", "moe-every-second-layer"]
)
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
    in_double = dict(dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager")
    reopened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", **in_double)
    packed = PackedAttention([70], torch.device("cpu"))
    ours = policy.logits(policy(tokens[0], packed.positions_T, packed))
    torch.testing.assert_close(ours, reopened(tokens).logits[0], rtol=0, atol=1e-9)


def test_experts_are_saved_one_by_one_and_read_fused_as_well(tmp_path):
    """Written one by one under the published names; read also as one tensor per layer (transformers 5)."""
    oracle = make_oracle("moe-dense-layer")
    oracle.save_pretrained(tmp_path / "single")
    oracle.save_pretrained(tmp_path / "fused", save_original_format=False)
    single, fused = (load_policy(tmp_path / kind, torch.float64) for kind in ("single", "fused"))
    for (name, a), (_, b) in zip(exported_tensors(single), exported_tensors(fused), strict=True):
        assert torch.equal(a, b), name
    save_policy(fused, tmp_path / "saved")
    names = {
        kind: set(load_file(tmp_path / kind / "model.safetensors")) for kind in ("single", "fused", "saved")
    }
    assert names["saved"] == names["single"] != names["fused"]
    assert "model.layers.0.mlp.experts.7.gate_proj.weight" in names["saved"]
    assert not any("gate_up" in name for name in names["saved"])


def test_expert_configuration_is_written_as_published(tmp_path):
    policy = Decoder(
        from_huggingface(make_oracle("moe-every-second-layer").config.to_dict()), torch.float64
    ).initialise(0)
    save_policy(policy, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["num_experts"], written["decoder_sparse_step"], written["mlp_only_layers"]) == (
        8,
        1,
        [0, 2, 3],
    )
    assert transformers.AutoConfig.from_pretrained(tmp_path).num_experts == 8


def test_half_precision_routes_like_float32():
    """Scores are not rounded to bf16: experts that differ in float32 stay different."""
    config = from_huggingface({"model_type": "qwen3_moe", **SMALL, **EXPERTS})
    layer = Decoder(config, torch.bfloat16).initialise(3).layers[0].feed_forward
    x = torch.randn(2000, config.hidden_size).bfloat16()
    scores = x.double() @ layer.router.weight.double().t()
    weights, experts = layer.route(x)
    assert weights.dtype == torch.bfloat16
    assert torch.equal(experts, scores.topk(3).indices)
    assert len((scores.bfloat16().topk(3).indices != experts).nonzero()) > 10, (
        "rounded scores would choose otherwise"
    )


@pytest.mark.gpu
def test_grouped_product_on_the_gpu_matches_float64():
    """Output and gradients in bf16, some experts idle, against the same layer in float64."""
    config = from_huggingface(
        {
            "model_type": "qwen3_moe",
            **SMALL,
            "hidden_size": 256,
            **EXPERTS,
            "num_experts": 64,
            "moe_intermediate_size": 128,
        }
    )
    layer = Decoder(config, torch.bfloat16, "cuda").initialise(0).layers[0].feed_forward
    exact = Decoder(config, torch.float64).layers[0].feed_forward
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(40, 256, device="cuda").bfloat16()
    assert len(layer.route(x)[1].unique()) < 64
    results = []
    for module, rows in ((layer, x), (exact, x.double().cpu())):
        rows.requires_grad_()
        out = module(rows)
        out.square().sum().backward()
        results.append([out, rows.grad, *(p.grad for p in module.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert (ours.cpu() - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_activation_checkpointing_changes_nothing(family):
    gradients = []
    for recompute in (Recompute(), Recompute(layers=1), EVERYTHING):
        policy = Decoder(from_huggingface({"model_type": family, **SMALL, **EXPERTS})).initialise(0)
        policy.recompute = recompute
        packed = PackedAttention([9, 4], torch.device("cpu"))
        policy.logits(policy(torch.arange(13), packed.positions_T, packed)).pow(2).sum().backward()
        gradients.append([p.grad for p in policy.parameters()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*gradients, strict=True))


def test_num_parameters_counts_every_parameter():
    for case in CASES:
        config = from_huggingface(make_oracle(case).config.to_dict())
        assert config.num_parameters == sum(p.numel() for p in Decoder(config).parameters()), case


def test_num_parameters_of_known_shapes_are_as_published():
    """As the Hugging Face pages of the models state them."""
    assert SHAPES["qwen3-8b"].num_parameters == 8_190_735_360
    assert SHAPES["qwen3-30b-a3b"].num_parameters == 30_532_122_624
    assert SHAPES["qwen3-235b-a22b"].num_parameters == 235_093_634_560


def test_unsupported_models_are_refused_by_name(tmp_path):
    families = "llama, qwen2, qwen3, qwen3_moe"
    with pytest.raises(ValueError, match=f"gpt2.*supported families: {families}.*rollout.backend=vllm"):
        from_huggingface({"model_type": "gpt2"})
    with pytest.raises(ValueError, match="sliding-window"):
        from_huggingface({"model_type": "qwen2", "use_sliding_window": True, **SMALL})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        load_policy(tmp_path, torch.float32)


def test_save_policy_warns_of_a_qwen2_that_vllm_misreads(tmp_path, recwarn):
    """vLLM computes head_dim as hidden_size / heads for this family, whatever config.json says."""
    fine = DecoderConfig("qwen2", 97, 96, 80, 1, 6, 2, 16, 64, qkv_bias=True)
    save_policy(Decoder(fine).initialise(0), tmp_path / "fine")
    save_policy(
        Decoder(dataclasses.replace(fine, family="qwen3", head_dim=8)).initialise(0),
        tmp_path / "other-family",
    )
    assert not recwarn
    with pytest.warns(UserWarning, match="head_dim 8, but hidden_size 96 / 6 heads is 16"):
        save_policy(Decoder(dataclasses.replace(fine, head_dim=8)).initialise(0), tmp_path / "misread")
