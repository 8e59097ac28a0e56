"""Hugging Face folders in and out: `config.json`, (sharded) safetensors, tokenizer files.

The fused parameters of the decoder are split into, and filled from, the names that transformers and vLLM use.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from paceline.policy.config import DecoderConfig, read_config, to_huggingface
from paceline.policy.decoder import Decoder

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
    "added_tokens.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Slice:
    """A Hugging Face tensor as rows `[start, stop)` of one of the decoder's parameters."""

    parameter: str
    start: int
    stop: int


def layout(config: DecoderConfig) -> dict[str, Slice]:
    """Every Hugging Face tensor name of this model and where it lies in the decoder."""
    q, kv, f, e = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size, config.hidden_size
    names: dict[str, Slice] = {"model.embed_tokens.weight": Slice("embedding.weight", 0, config.vocab_size)}
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        names[f"{theirs}input_layernorm.weight"] = Slice(f"{ours}attention_norm.weight", 0, e)
        names[f"{theirs}post_attention_layernorm.weight"] = Slice(f"{ours}feed_forward_norm.weight", 0, e)
        if config.qk_norm:
            names[f"{theirs}self_attn.q_norm.weight"] = Slice(f"{ours}attention.q_norm.weight", 0, config.head_dim)
            names[f"{theirs}self_attn.k_norm.weight"] = Slice(f"{ours}attention.k_norm.weight", 0, config.head_dim)
        for kind, present in (("weight", True), ("bias", config.qkv_bias)):
            if present:
                names[f"{theirs}self_attn.q_proj.{kind}"] = Slice(f"{ours}attention.qkv.{kind}", 0, q)
                names[f"{theirs}self_attn.k_proj.{kind}"] = Slice(f"{ours}attention.qkv.{kind}", q, q + kv)
                names[f"{theirs}self_attn.v_proj.{kind}"] = Slice(f"{ours}attention.qkv.{kind}", q + kv, q + 2 * kv)
        for kind, present in (("weight", True), ("bias", config.output_bias)):
            if present:
                names[f"{theirs}self_attn.o_proj.{kind}"] = Slice(f"{ours}attention.output.{kind}", 0, e)
        for kind, present in (("weight", True), ("bias", config.mlp_bias)):
            if present:
                names[f"{theirs}mlp.gate_proj.{kind}"] = Slice(f"{ours}feed_forward.gate_up.{kind}", 0, f)
                names[f"{theirs}mlp.up_proj.{kind}"] = Slice(f"{ours}feed_forward.gate_up.{kind}", f, 2 * f)
                names[f"{theirs}mlp.down_proj.{kind}"] = Slice(f"{ours}feed_forward.down.{kind}", 0, e)
    names["model.norm.weight"] = Slice("norm.weight", 0, e)
    if not config.tie_embeddings:
        names["lm_head.weight"] = Slice("head.weight", 0, config.vocab_size)
    return names


def exported_tensors(decoder: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the decoder's parameters under their Hugging Face names."""
    parameters = dict(decoder.named_parameters())
    for name, piece in layout(decoder.config).items():
        yield name, parameters[piece.parameter].detach()[piece.start : piece.stop]


def load_policy(folder: str | Path, dtype: torch.dtype, device: str | torch.device = "cpu") -> Decoder:
    folder = Path(folder)
    decoder = Decoder(read_config(folder), dtype, device)
    fill(decoder, weight_reader(folder))
    return decoder


def fill(decoder: Decoder, read: Callable[[str], torch.Tensor]) -> None:
    parameters = dict(decoder.named_parameters())
    with torch.no_grad():
        for name, piece in layout(decoder.config).items():
            tensor, target = read(name), parameters[piece.parameter][piece.start : piece.stop]
            if tensor.shape != target.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the configuration asks for {tuple(target.shape)}")
            target.copy_(tensor)


def weight_reader(folder: Path) -> Callable[[str], torch.Tensor]:
    """Reads one tensor by name from `model.safetensors` or from the shards its index lists."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shard_of = json.loads(index.read_text())["weight_map"]
    elif (folder / "model.safetensors").is_file():
        with safe_open(folder / "model.safetensors", "pt") as file:
            shard_of = dict.fromkeys(file.keys(), "model.safetensors")
    else:
        raise FileNotFoundError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")
    open_shards: dict[str, safe_open] = {}

    def read(name: str) -> torch.Tensor:
        if name not in shard_of:
            raise ValueError(f"{folder} lacks the tensor {name}; it holds {len(shard_of)} others")
        shard = shard_of[name]
        if shard not in open_shards:
            open_shards[shard] = safe_open(folder / shard, "pt")
        return open_shards[shard].get_tensor(name)

    return read


def save_policy(
    decoder: Decoder, folder: str | Path, tokenizer_from: str | Path | None = None, dtype: torch.dtype | None = None, shard_bytes: int = 5 << 30
) -> None:
    """Writes a folder that transformers, vLLM and `load_policy` open; tokenizer files are copied along."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype or decoder.dtype
    (folder / "config.json").write_text(json.dumps(to_huggingface(decoder.config, str(dtype).removeprefix("torch.")), indent=2) + "\n")
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in exported_tensors(decoder):
        tensor = tensor.to("cpu", dtype).contiguous().clone()
        if size and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
    else:
        _save_shards(shards, folder)
    for file in TOKENIZER_FILES:
        if tokenizer_from is not None and (Path(tokenizer_from) / file).is_file():
            shutil.copyfile(Path(tokenizer_from) / file, folder / file)


def _save_shards(shards: list[dict[str, torch.Tensor]], folder: Path) -> None:
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    total = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
