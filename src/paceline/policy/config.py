"""The shape of a decoder, read from and written to a Hugging Face `config.json`.

The families differ in few places (biases, QK-norm, experts, how RoPE is scaled), so one flat description
serves them all.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.policy.files import blame, read_json

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary frequencies; `kind` is Hugging Face's `rope_type` and the rest are that type's own
    parameters.
    """

    theta: float = 10000.0
    kind: str = "default"
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DecoderConfig:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    num_experts: int = 0  # 0: every layer has one feed-forward, of intermediate_size
    num_experts_per_token: int = 0
    expert_intermediate_size: int = 0
    normalise_expert_weights: bool = False  # the chosen experts' weights add up to one
    dense_layers: tuple[int, ...] = ()  # layers without experts in a model that has them

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def expert_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if self.has_experts(layer))

    @property
    def num_parameters(self) -> int:
        h, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = h * (q + 2 * kv) + q * h + 2 * h + (2 * self.head_dim if self.qk_norm else 0)
        layer += (q + 2 * kv if self.qkv_bias else 0) + (h if self.output_bias else 0)
        dense = 3 * h * self.intermediate_size + (2 * self.intermediate_size + h if self.mlp_bias else 0)
        sparse = self.num_experts * (3 * h * self.expert_intermediate_size + h)
        feed_forwards = sum(sparse if self.has_experts(i) else dense for i in range(self.num_layers))
        return (
            self.num_layers * layer
            + feed_forwards
            + h
            + self.vocab_size * h * (1 if self.tie_embeddings else 2)
        )


def from_huggingface(config: dict[str, Any]) -> DecoderConfig:
    family = config.get("model_type", "")
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} is not supported; supported families: {', '.join(FAMILIES)}")
    if config.get("use_sliding_window") or any(
        kind != "full_attention" for kind in config.get("layer_types") or ()
    ):
        raise ValueError(
            f"{family}: sliding-window attention is not supported; every layer must attend to the whole "
            "context"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported; supported: silu")
    bias = bool(config.get("attention_bias", False))
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads = {heads} must be a multiple of num_key_value_heads = {kv_heads}"
        )
    return DecoderConfig(
        family=family,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=_size(config, "hidden_size"),
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_size(config, "head_dim") if config.get("head_dim") else config["hidden_size"] // heads,
        max_positions=_size(config, "max_position_embeddings")
        if "max_position_embeddings" in config
        else 2048,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=_rope_from_huggingface(config),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or bias,
        output_bias=family != "qwen2" and bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        eos_token_ids=_end_tokens(config),
        bos_token_id=config.get("bos_token_id"),
        **(_experts_from_huggingface(config) if family == "qwen3_moe" else {}),
    )


def to_huggingface(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    eos = list(config.eos_token_ids)
    out = {
        "architectures": [FAMILIES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
        "dtype": dtype,
        # Both spellings: transformers 5 reads `rope_parameters`, vLLM and earlier transformers the other two.
        "rope_parameters": {
            "rope_type": config.rope.kind,
            "rope_theta": config.rope.theta,
            **config.rope.parameters,
        },
        "rope_theta": config.rope.theta,
        "rope_scaling": None
        if config.rope.kind == "default"
        else {"rope_type": config.rope.kind, **config.rope.parameters},
    }
    if config.family != "qwen2":
        out["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        out["mlp_bias"] = config.mlp_bias
    if config.family == "qwen3_moe":
        out |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_token,
            "moe_intermediate_size": config.expert_intermediate_size,
            "norm_topk_prob": config.normalise_expert_weights,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(config.dense_layers),
        }
    return out


def read_config(folder: Path) -> DecoderConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a Hugging Face folder: it holds no config.json")
    with blame(path):
        config = from_huggingface(read_json(path))
    generation = folder / "generation_config.json"
    if generation.is_file():  # instruct models list further end tokens only here
        with blame(generation):
            extra = _end_tokens(read_json(generation))
        config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + extra)))
    return config


def _size(config: dict[str, Any], key: str) -> int:
    value = config[key]
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} = {value!r}: must be a whole number, 1 or more")
    return value


def _end_tokens(config: dict[str, Any]) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    tokens = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(isinstance(token, int) for token in tokens):
        raise ValueError(f"eos_token_id = {eos!r}: must be one token id or a list of them")
    return tokens


def _experts_from_huggingface(config: dict[str, Any]) -> dict[str, Any]:
    """Which layers are dense is said twice there, as a list and as a step between sparse layers; here it is
    one list.

    The public configurations spell the count `num_experts`, transformers 5 writes `num_local_experts`.
    """
    layers, step, listed = (
        range(_size(config, "num_hidden_layers")),
        config.get("decoder_sparse_step") or 1,
        config.get("mlp_only_layers") or (),
    )
    return dict(
        num_experts=_size(config, "num_experts" if "num_experts" in config else "num_local_experts"),
        num_experts_per_token=_size(config, "num_experts_per_tok"),
        expert_intermediate_size=_size(config, "moe_intermediate_size"),
        normalise_expert_weights=bool(config.get("norm_topk_prob", False)),
        dense_layers=tuple(i for i in layers if i in listed or (i + 1) % step != 0),
    )


def _rope_from_huggingface(config: dict[str, Any]) -> RopeConfig:
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    if kind == "default":
        parameters = {}
    if kind == "yarn":
        parameters.setdefault("original_max_position_embeddings", config.get("max_position_embeddings", 2048))
    return RopeConfig(float(theta), kind, parameters)
