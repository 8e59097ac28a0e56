"""The shape of a model as far as time and memory go, from a name or any Hugging Face `config.json`.

It takes more models than the engine runs: any decoder with gated feed-forwards, grouped-query attention and,
perhaps, routed experts. Their keys are translated to those of a family that `policy/config.py` reads.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.policy import config as policy_config
from paceline.policy.config import DecoderConfig
from paceline.policy.files import errors_name, read_json
from paceline.policy.shapes import SHAPES

# Kinds of layers, as `config.json` calls them, that are modelled.
ATTENTION_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class ModelShape(DecoderConfig):
    """A decoder's sizes, with a name, the width of the experts that every token uses, and the window."""

    name: str = ""
    shared_intermediate_size: int = 0
    window: int = 0  # tokens that sliding-window layers attend to; 0: there are none

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - len(self.dense_layers) if self.num_experts else 0

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def expert_parameters(self) -> int:
        return 3 * self.hidden_size * self.expert_intermediate_size

    @property
    def embedding_parameters(self) -> int:
        """Returns the parameters of the embedding and of the head, which may be one matrix."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)

    @property
    def matrix_parameters(self) -> int:
        """Returns the parameters in matrices; norms and biases are below a thousandth."""
        return self._layer_parameters(self.num_experts) + self.embedding_parameters

    @property
    def active_parameters(self) -> int:
        """Returns the parameters that multiply one token's activations; the embedding is a lookup."""
        return self._layer_parameters(self.num_experts_per_token) + self.vocab_size * self.hidden_size

    def _layer_parameters(self, experts: int) -> int:
        hidden = self.hidden_size
        attention = hidden * self.qkv_width + self.query_width * hidden
        dense = 3 * hidden * self.intermediate_size
        router = hidden * self.num_experts
        sparse = experts * self.expert_parameters + router + 3 * hidden * self.shared_intermediate_size
        num_dense = self.num_layers - self.num_expert_layers
        return self.num_layers * attention + num_dense * dense + self.num_expert_layers * sparse

    def kv_bytes_per_token(self, bytes_per_value: float) -> float:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


def load_model(name: str) -> ModelShape:
    """Loads a built-in shape by its name, a Hugging Face folder, or a `config.json`."""
    if name in SHAPES:
        return from_decoder_config(name, SHAPES[name])
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"model {name!r} is neither a built-in shape ({', '.join(SHAPES)}) "
            "nor a folder or file with a Hugging Face config.json"
        )
    with errors_name(path):
        return from_huggingface(path.parent.name or name, read_json(path))


def from_decoder_config(name: str, config: DecoderConfig, shared_intermediate_size: int = 0) -> ModelShape:
    return ModelShape(**vars(config), name=name, shared_intermediate_size=shared_intermediate_size)


def from_huggingface(name: str, config: dict[str, Any]) -> ModelShape:
    """Reads the content of a `config.json`, whatever its family."""
    config = config.get("text_config") or config  # multimodal models keep the decoder's shape here
    if not isinstance(config, dict):
        raise ValueError(f"text_config = {config!r}: must be an object")
    if config.get("kv_lora_rank"):
        raise ValueError(
            f"kv_lora_rank = {config['kv_lora_rank']}: latent attention is not modelled, "
            "only grouped-query attention is"
        )
    kinds = set(config.get("layer_types") or ()) - {*ATTENTION_LAYERS}
    if kinds:
        raise ValueError(
            f"layer_types has {', '.join(sorted(map(str, kinds)))}: "
            f"only {' and '.join(ATTENTION_LAYERS)} are modelled"
        )
    required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if not _experts(config):
        required = (*required, "intermediate_size")
    missing = [key for key in required if config.get(key) is None]
    if missing:
        raise ValueError(
            f"config.json has no {', '.join(missing)}; "
            "supported are decoders described like Llama, Qwen or Mixtral"
        )
    known = _known_family(config)
    shared = 0
    if known["model_type"] == "qwen3_moe":
        expert_width = known["moe_intermediate_size"]
        shared = _first(config, "shared_expert_intermediate_size")
        shared = shared or _first(config, "n_shared_experts") * expert_width
    shape = from_decoder_config(name, policy_config.from_huggingface(known), shared)
    return dataclasses.replace(shape, window=_window(config))


def _known_family(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the same sizes in the keys of a family that the policy's reader knows."""
    sizes = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("vocab_size", "tie_word_embeddings", "intermediate_size"),
    )
    known = {key: config[key] for key in sizes if config.get(key) is not None}
    known.setdefault("num_key_value_heads", None)  # one for each query head
    experts = _experts(config)
    if not experts:
        return known | {"model_type": "llama"}
    listed = config.get("mlp_only_layers") or ()
    if not isinstance(listed, list | tuple):
        raise ValueError(f"mlp_only_layers = {listed!r}: must be a list of layers")
    dense_first = min(_first(config, "first_k_dense_replace"), _first(config, "num_hidden_layers"))
    return known | {
        "model_type": "qwen3_moe",
        "intermediate_size": known.get("intermediate_size") or 4 * _first(config, "hidden_size"),
        "num_experts": experts,
        "num_experts_per_tok": _first(config, "num_experts_per_tok", "top_k_experts"),
        "moe_intermediate_size": _first(config, "moe_intermediate_size", "intermediate_size"),
        "decoder_sparse_step": _first(config, "decoder_sparse_step"),
        "mlp_only_layers": [*listed, *range(dense_first)],
    }


def _experts(config: dict[str, Any]) -> int:
    return _first(config, "num_experts", "num_local_experts", "n_routed_experts")


def _window(config: dict[str, Any]) -> int:
    """Returns the tokens that sliding-window layers attend to; 0 where there are none."""
    layers = config.get("layer_types") or ("sliding_attention",)
    slides = config.get("use_sliding_window", True) and "sliding_attention" in layers
    return _first(config, "sliding_window") if slides else 0


def _first(config: dict[str, Any], *keys: str) -> int:
    """Returns the value of the first of these keys that has one, which must be a size; 0: none has."""
    for key in keys:
        value = config.get(key)
        if value:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{key} = {value!r}: must be a whole number, 1 or more")
            return value
    return 0
