"""The shape of a model as far as time and memory go, from a name or any Hugging Face `config.json`.

More tolerant than `policy/config.py`: a model that the engine cannot run can still be planned for, if it is a
decoder with gated feed-forwards, grouped-query attention and, perhaps, routed experts.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.policy.config import DecoderConfig
from paceline.policy.shapes import SHAPES


@dataclass(frozen=True)
class ModelShape:
    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int  # of a dense layer
    vocab: int
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_feed_forward: int = 0
    shared_feed_forward: int = 0  # width of experts that every token uses
    dense_layers: int = 0  # layers without experts in a model that has them

    @property
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Per layer."""
        return self.hidden * self.qkv_width + self.heads * self.head_dim * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.expert_feed_forward

    @property
    def parameters(self) -> int:
        """Matrices only; norms and biases are below a thousandth."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self._body(self.experts) + embeddings

    @property
    def active_parameters(self) -> int:
        """Those that multiply one token's activations; the embedding is a lookup."""
        return self._body(self.experts_per_token) + self.vocab * self.hidden

    def _body(self, experts: int) -> int:
        dense = (self.layers - self.expert_layers) * 3 * self.hidden * self.feed_forward
        sparse = self.expert_layers * (
            experts * self.expert_parameters
            + self.hidden * self.experts
            + 3 * self.hidden * self.shared_feed_forward
        )
        return self.layers * self.attention_parameters + dense + sparse

    def kv_bytes_per_token(self, bytes_per_value: float) -> float:
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value


def load_model(name: str) -> ModelShape:
    """A built-in shape's name, a Hugging Face folder, or a `config.json`."""
    if name in SHAPES:
        return from_decoder_config(name, SHAPES[name])
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"model {name!r} is neither a built-in shape ({', '.join(SHAPES)}) nor a folder or file with a "
            "Hugging Face config.json"
        )
    return from_huggingface(path.parent.name or name, json.loads(path.read_text()))


def from_decoder_config(name: str, config: DecoderConfig) -> ModelShape:
    return ModelShape(
        name,
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
        config.vocab_size,
        config.tie_embeddings,
        config.num_experts,
        config.num_experts_per_token,
        config.expert_intermediate_size,
        dense_layers=len(config.dense_layers),
    )


def from_huggingface(name: str, config: dict[str, Any]) -> ModelShape:
    config = config.get("text_config") or config  # multimodal models keep the decoder's shape here
    if config.get("kv_lora_rank"):
        raise ValueError(
            f"{name}: kv_lora_rank = {config['kv_lora_rank']}: latent attention is not modelled, only "
            "grouped-query attention is"
        )
    missing = [
        key
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        if key not in config
    ]
    if missing:
        raise ValueError(
            f"{name}: config.json has no {', '.join(missing)}; supported are decoders described like Llama, "
            "Qwen or Mixtral"
        )
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    expert_width = _first(config, "moe_intermediate_size", "intermediate_size") if experts else 0
    shared = config.get("shared_expert_intermediate_size") or config.get("n_shared_experts", 0) * expert_width
    layers, step = config["num_hidden_layers"], config.get("decoder_sparse_step") or 1
    listed, first_dense = config.get("mlp_only_layers") or (), config.get("first_k_dense_replace") or 0
    dense = (
        sum(i in listed or (i + 1) % step != 0 or i < first_dense for i in range(layers)) if experts else 0
    )
    return ModelShape(
        name=name,
        hidden=config["hidden_size"],
        layers=layers,
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        feed_forward=config.get("intermediate_size") or 4 * config["hidden_size"],
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        experts_per_token=_first(config, "num_experts_per_tok", "top_k_experts") if experts else 0,
        expert_feed_forward=expert_width,
        shared_feed_forward=shared if experts else 0,
        dense_layers=dense,
    )


def _first(config: dict[str, Any], *keys: str) -> int:
    return next((int(config[key]) for key in keys if config.get(key)), 0)
