"""Hugging Face folders in and out: `config.json`, (sharded) safetensors, tokenizer files.

The fused parameters of the decoder are split into, and filled from, the names that transformers and vLLM use.
Experts are one tensor each on disk, which is what both read and what the published checkpoints hold;
transformers 5 can also write a layer's experts as one tensor, as it keeps them in memory, and such folders
are read too.
"""

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from paceline.policy.config import DecoderConfig, read_config, to_huggingface
from paceline.policy.decoder import Decoder
from paceline.policy.files import DamagedFile, errors_name, read_json

# What is copied along with a policy, where it exists.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
# Types that a recipe can name.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
# The name of one expert's matrix, and that of the tensor in which transformers 5 keeps a layer's experts.
EXPERT_TENSOR = re.compile(
    r"(?P<layer>.+\.mlp\.experts)\.(?P<index>\d+)\.(?P<kind>gate|up|down)_proj\.weight"
)
FUSED_EXPERTS = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
# The largest shard that `save_policy` writes, in bytes.
SHARD_BYTES = 5 << 30


@dataclass(frozen=True)
class Slice:
    """A Hugging Face tensor as rows `[start, stop)` of a decoder's parameter, or of one expert's part."""

    parameter: str
    start: int
    stop: int
    expert: int | None = None

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns the view of the parameter that this slice describes."""
        whole = parameter if self.expert is None else parameter[self.expert]
        return whole[self.start : self.stop]


def layout(config: DecoderConfig) -> dict[str, Slice]:
    """Returns every Hugging Face tensor name of this model and where it lies in the decoder."""
    size = config.hidden_size
    names: dict[str, Slice] = {"model.embed_tokens.weight": Slice("embedding.weight", 0, config.vocab_size)}
    for i in range(config.num_layers):
        ours = f"layers.{i}."
        theirs = f"model.layers.{i}."
        names[f"{theirs}input_layernorm.weight"] = Slice(f"{ours}attention_norm.weight", 0, size)
        names[f"{theirs}post_attention_layernorm.weight"] = Slice(f"{ours}feed_forward_norm.weight", 0, size)
        names |= _attention_layout(config, f"{ours}attention.", f"{theirs}self_attn.")
        feed_forward_layout = _expert_layout if config.has_experts(i) else _feed_forward_layout
        names |= feed_forward_layout(config, f"{ours}feed_forward.", f"{theirs}mlp.")
    names["model.norm.weight"] = Slice("norm.weight", 0, size)
    if not config.tie_embeddings:
        names["lm_head.weight"] = Slice("head.weight", 0, config.vocab_size)
    return names


def _attention_layout(config: DecoderConfig, ours: str, theirs: str) -> dict[str, Slice]:
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    names = {}
    if config.qk_norm:
        names[f"{theirs}q_norm.weight"] = Slice(f"{ours}q_norm.weight", 0, config.head_dim)
        names[f"{theirs}k_norm.weight"] = Slice(f"{ours}k_norm.weight", 0, config.head_dim)
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        names[f"{theirs}q_proj.{kind}"] = Slice(f"{ours}qkv.{kind}", 0, q)
        names[f"{theirs}k_proj.{kind}"] = Slice(f"{ours}qkv.{kind}", q, q + kv)
        names[f"{theirs}v_proj.{kind}"] = Slice(f"{ours}qkv.{kind}", q + kv, q + 2 * kv)
    for kind in ("weight", "bias") if config.output_bias else ("weight",):
        names[f"{theirs}o_proj.{kind}"] = Slice(f"{ours}output.{kind}", 0, config.hidden_size)
    return names


def _feed_forward_layout(config: DecoderConfig, ours: str, theirs: str) -> dict[str, Slice]:
    inner = config.intermediate_size
    names = {}
    for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
        names[f"{theirs}gate_proj.{kind}"] = Slice(f"{ours}gate_up.{kind}", 0, inner)
        names[f"{theirs}up_proj.{kind}"] = Slice(f"{ours}gate_up.{kind}", inner, 2 * inner)
        names[f"{theirs}down_proj.{kind}"] = Slice(f"{ours}down.{kind}", 0, config.hidden_size)
    return names


def _expert_layout(config: DecoderConfig, ours: str, theirs: str) -> dict[str, Slice]:
    f, e = config.expert_intermediate_size, config.hidden_size
    names = {f"{theirs}gate.weight": Slice(f"{ours}router.weight", 0, config.num_experts)}
    for x in range(config.num_experts):
        names[f"{theirs}experts.{x}.gate_proj.weight"] = Slice(f"{ours}gate_up", 0, f, expert=x)
        names[f"{theirs}experts.{x}.up_proj.weight"] = Slice(f"{ours}gate_up", f, 2 * f, expert=x)
        names[f"{theirs}experts.{x}.down_proj.weight"] = Slice(f"{ours}down", 0, e, expert=x)
    return names


def exported_tensors(decoder: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields views of the decoder's parameters under their Hugging Face names."""
    parameters = dict(decoder.named_parameters())
    for name, piece in layout(decoder.config).items():
        yield name, piece.of(parameters[piece.parameter].detach())


def load_policy(folder: str | Path, dtype: torch.dtype, device: str | torch.device = "cpu") -> Decoder:
    """Returns the policy in a Hugging Face folder, with its weights in `dtype`."""
    folder = Path(folder)
    decoder = Decoder(read_config(folder), dtype, device)
    with errors_name(folder):
        fill(decoder, weight_reader(folder))
    return decoder


def fill(decoder: Decoder, read: Callable[[str], torch.Tensor]) -> None:
    """Copies every tensor into the decoder; `read` returns one by its Hugging Face name."""
    parameters = dict(decoder.named_parameters())
    with torch.no_grad():
        for name, piece in layout(decoder.config).items():
            tensor, target = read(name), piece.of(parameters[piece.parameter])
            if tensor.shape != target.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, "
                    f"the configuration asks for {tuple(target.shape)}"
                )
            target.copy_(tensor)


def weight_reader(folder: Path) -> Callable[[str], torch.Tensor]:
    """Returns a function that reads a tensor by name, from `model.safetensors` or its index's shards."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with errors_name(index):
            shard_of = dict(read_json(index)["weight_map"])
    elif (folder / "model.safetensors").is_file():
        with errors_name(folder / "model.safetensors"), safe_open(folder / "model.safetensors", "pt") as file:
            shard_of = dict.fromkeys(file.keys(), "model.safetensors")
    else:
        raise FileNotFoundError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")
    open_shards: dict[str, safe_open] = {}

    def shard_with(name: str) -> safe_open:
        shard = shard_of[name]
        if shard not in open_shards:
            if not (folder / shard).is_file():
                raise FileNotFoundError(f"{index} lists {shard}, which {folder} does not hold")
            open_shards[shard] = safe_open(folder / shard, "pt")
        return open_shards[shard]

    def read(name: str) -> torch.Tensor:
        if name in shard_of:
            with errors_name(folder / shard_of[name]):
                return shard_with(name).get_tensor(name)
        expert = EXPERT_TENSOR.fullmatch(name)
        if expert and (fused := f"{expert['layer']}.{FUSED_EXPERTS[expert['kind']]}") in shard_of:
            with errors_name(folder / shard_of[fused]):
                return _read_expert(shard_with(fused).get_slice(fused), int(expert["index"]), expert["kind"])
        raise DamagedFile(f"{folder} lacks the tensor {name}; it holds {len(shard_of)} others")

    return read


def _read_expert(experts_XNK: Any, index: int, kind: str) -> torch.Tensor:
    """One expert's matrix from the tensor that holds all of a layer's; gate lies above up."""
    rows = experts_XNK.get_shape()[1]
    start, stop = {"gate": (0, rows // 2), "up": (rows // 2, rows), "down": (0, rows)}[kind]
    return experts_XNK[index, start:stop]


def save_policy(
    decoder: Decoder,
    folder: str | Path,
    tokenizer_from: str | Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a folder that transformers, vLLM and `load_policy` open; tokenizer files are copied along."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype or decoder.dtype
    _warn_of_head_dim(decoder.config)
    (folder / "config.json").write_text(
        json.dumps(to_huggingface(decoder.config, str(dtype).removeprefix("torch.")), indent=2) + "\n"
    )
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


def _warn_of_head_dim(config: DecoderConfig) -> None:
    if config.family == "qwen2" and config.head_dim * config.num_heads != config.hidden_size:
        warnings.warn(
            f"this qwen2 policy has head_dim {config.head_dim}, "
            f"but hidden_size {config.hidden_size} / {config.num_heads} heads is "
            f"{config.hidden_size / config.num_heads:g}: "
            "vLLM ignores head_dim for qwen2 and would compute something else without saying so",
            stacklevel=3,
        )


def _save_shards(shards: list[dict[str, torch.Tensor]], folder: Path) -> None:
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    total = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
