"""The shape of a decoder, read from and written to a Hugging Face `config.json`.

The families differ in few places (biases, QK-norm, experts, how RoPE is scaled), so one flat description,
`DecoderConfig`, serves them all. A family is not a class: it is the set of values that its fields take.

To add a family:

1. List its `model_type` and architecture in FAMILIES.
2. Map its keys to `DecoderConfig` in `from_huggingface`, and back in `to_huggingface`. Refuse, with an error
   that names the key, whatever of it is not computed, so that no model is silently run as another one; list
   the keys that it has besides in `config_keys.py`.
3. Where its layers differ in a way that no field describes, add a field with the other families' behaviour as
   its default, and compute it in `decoder.py` (learning) and in `paged/forward.py` (generation).
4. Where its checkpoints use other tensor names, add them to `layout` in `huggingface.py`; a new way to scale
   RoPE goes to `rope.py`.
5. Add a small random model of it to `tests/policy/test_against_transformers.py`, which compares logits,
   gradients and exported folders with transformers.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.policy.config_keys import refuse_unknown_keys
from paceline.policy.files import errors_name, read_json
from paceline.policy.quantised import read_quantisation
from paceline.policy.rope_config import RopeConfig, read_rope

# Hugging Face's `model_type` and architecture of each supported family.
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# What to say of families that people ask for.
NOT_YET = {
    "mistral": "Mistral without a sliding window is Llama's arithmetic, but its folder is not read yet. "
}

# What transformers assumes where a `config.json` has no key. A null is no default.
DEFAULT_MAX_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768, "qwen3_moe": 32768}
DEFAULT_TOKENS = {"llama": {"bos_token_id": 1, "eos_token_id": 2}}
DEFAULT_KV_HEADS = {"qwen2": 32, "qwen3": 32, "qwen3_moe": 4}
QWEN3_HEAD_DIM = 128


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder of any supported family."""

    # A key of FAMILIES; it decides what the exported `config.json` says, and nothing that is computed.
    family: str
    vocab_size: int
    hidden_size: int
    # Inner size of a feed-forward without experts.
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Positions that the RoPE table has, the longest a sequence can be.
    max_positions: int
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    # The LM head is the embedding.
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    # RMSNorm over each head of Q and K, before RoPE.
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    # 0: every layer has one feed-forward, of `intermediate_size`.
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_intermediate_size: int = 0
    # The chosen experts' weights add up to one.
    normalise_expert_weights: bool = False
    # Layers without experts in a model that has them.
    dense_layers: tuple[int, ...] = ()

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def expert_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if self.has_experts(layer))

    @property
    def num_parameters(self) -> int:
        """The number of parameters, of all experts where there are any."""
        h = self.hidden_size
        q = self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        layer = h * (q + 2 * kv) + q * h + 2 * h + (2 * self.head_dim if self.qk_norm else 0)
        layer += (q + 2 * kv if self.qkv_bias else 0) + (h if self.output_bias else 0)
        dense = 3 * h * self.intermediate_size + (2 * self.intermediate_size + h if self.mlp_bias else 0)
        sparse = self.num_experts * (3 * h * self.expert_intermediate_size + h)
        feed_forwards = sum(sparse if self.has_experts(i) else dense for i in range(self.num_layers))
        embeddings = self.vocab_size * h * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + feed_forwards + h + embeddings


def from_huggingface(config: dict[str, Any]) -> DecoderConfig:
    """Returns the shape that a `config.json` describes; raises if anything in it is unsupported."""
    family = config.get("model_type", "")
    if family not in FAMILIES:
        own = NOT_YET.get(family, "")
        raise ValueError(
            f"model_type {family!r} is not supported; supported families: {', '.join(FAMILIES)}. {own}"
            "With rollout.backend=vllm it is the same, because the policy that learns is read here"
        )
    layer_types = config.get("layer_types") or ()
    if _flag(config, "use_sliding_window") or any(kind != "full_attention" for kind in layer_types):
        raise ValueError(
            f"{family}: sliding-window attention is not supported; "
            "every layer must attend to the whole context"
        )
    # Two names of one function.
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported; supported: silu")
    config = DEFAULT_TOKENS.get(family, {}) | config
    bias = _flag(config, "attention_bias")
    heads = _size(config, "num_attention_heads")
    kv_heads = _kv_heads(config, family, heads)
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads = {heads} must be a multiple of num_key_value_heads = {kv_heads}"
        )
    max_positions = _size(config, "max_position_embeddings", DEFAULT_MAX_POSITIONS[family])
    return DecoderConfig(
        family=family,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=_size(config, "hidden_size"),
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(config, family, heads),
        max_positions=max_positions,
        norm_eps=_epsilon(config),
        rope=read_rope(config, max_positions),
        tie_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=family == "qwen2" or bias,
        output_bias=family != "qwen2" and bias,
        mlp_bias=_flag(config, "mlp_bias"),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        eos_token_ids=_end_tokens(config),
        bos_token_id=config.get("bos_token_id"),
        **(_experts_from_huggingface(config) if family == "qwen3_moe" else {}),
    )


def to_huggingface(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    eos = list(config.eos_token_ids)
    scaling = {"rope_type": config.rope.kind, **config.rope.parameters}
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
        "rope_scaling": None if config.rope.kind == "default" else scaling,
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
        aside = next(folder.glob(".saving-*/old/config.json"), None)
        why = f"; a save was cut off, and what it replaced lies in {aside.parent}" if aside else ""
        raise FileNotFoundError(f"{folder} is not a Hugging Face folder: it holds no config.json{why}")
    with errors_name(path):
        raw = read_json(path)
        config = from_huggingface(raw)
        refuse_unknown_keys(raw, config.family, FAMILIES[config.family])
    read_quantisation(folder, raw)
    generation = folder / "generation_config.json"
    if generation.is_file():
        # Instruct models list further end tokens only here.
        with errors_name(generation):
            extra = _end_tokens(read_json(generation))
        config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + extra)))
    if beyond := [token for token in config.eos_token_ids if not 0 <= token < config.vocab_size]:
        raise ValueError(
            f"{folder}: eos_token_id = {beyond[0]} (config.json or generation_config.json) is outside the "
            f"vocabulary of {config.vocab_size} tokens, so no response could end with it; correct it there"
        )
    return config


def _size(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """A key's value, which must be a size; `default` where the key is missing."""
    value = config[key] if default is None else config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} = {value!r}: must be a whole number, 1 or more")
    return value


def _flag(config: dict[str, Any], key: str) -> bool:
    """A key's value, which must be true or false; false where the key is missing or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} = {value!r}: must be true or false")
    return bool(value)


def _epsilon(config: dict[str, Any]) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"rms_norm_eps = {value!r}: must be a number, 0 or more")
    return value


def _head_dim(config: dict[str, Any], family: str, heads: int) -> int:
    missing = QWEN3_HEAD_DIM if family == "qwen3" and "head_dim" not in config else None
    size = missing or (
        _size(config, "head_dim") if config.get("head_dim") else config["hidden_size"] // heads
    )
    if size % 2 or not size:
        raise ValueError(f"head_dim = {size}: must be even, since RoPE turns its dimensions in pairs")
    return size


def _kv_heads(config: dict[str, Any], family: str, heads: int) -> int:
    """As transformers reads it: null is one for each query head, a missing key the family's default."""
    if "num_key_value_heads" not in config:
        return DEFAULT_KV_HEADS.get(family, heads)
    return heads if config["num_key_value_heads"] is None else _size(config, "num_key_value_heads")


def _end_tokens(config: dict[str, Any]) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    tokens = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(isinstance(token, int) for token in tokens):
        raise ValueError(f"eos_token_id = {eos!r}: must be one token id or a list of them")
    return tokens


def _experts_from_huggingface(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `DecoderConfig` that describe experts.

    `config.json` states twice which layers are dense, as a list and as a step between sparse layers; here it
    is one list. The public configurations spell the count `num_experts`, transformers 5 writes
    `num_local_experts`.
    """
    layers = range(_size(config, "num_hidden_layers"))
    step = config.get("decoder_sparse_step") or 1
    listed = config.get("mlp_only_layers") or ()
    experts = _size(config, "num_experts" if "num_experts" in config else "num_local_experts")
    chosen = _size(config, "num_experts_per_tok")
    if chosen > experts:
        raise ValueError(f"num_experts_per_tok = {chosen} must be at most num_experts = {experts}")
    return dict(
        num_experts=experts,
        num_experts_per_token=chosen,
        expert_intermediate_size=_size(config, "moe_intermediate_size"),
        normalise_expert_weights=_flag(config, "norm_topk_prob"),
        dense_layers=tuple(i for i in layers if i in listed or (i + 1) % step != 0),
    )
