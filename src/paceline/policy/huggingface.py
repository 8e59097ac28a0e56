"""Hugging Face folders in and out: `config.json`, (sharded) safetensors, tokenizer files.

The fused parameters of the decoder are split into, and filled from, the names that transformers and vLLM use.
Experts are one tensor each on disk, which is what both read and what the published checkpoints hold;
transformers 5 can also write a layer's experts as one tensor, as it keeps them in memory, and such folders
are read too.
"""

import functools
import json
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.policy.config import DecoderConfig, read_config, to_huggingface
from paceline.policy.decoder import Decoder
from paceline.policy.files import DamagedFile, errors_name, read_json
from paceline.policy.model_files import (
    TOKENIZER_FILES,
    WEIGHT_FILES,
    copy_files,
    replaced_files,
    save_tensors,
)
from paceline.policy.weight_files import INDEX_FILE, SINGLE_FILE, WeightFiles

# Types that a recipe can name.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
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


def pieces_by_parameter(config: DecoderConfig) -> dict[str, list[str]]:
    """Returns the Hugging Face tensors that each parameter consists of, in the order of its rows."""
    pieces: dict[str, list[str]] = {}
    for name, piece in sorted(layout(config).items(), key=lambda item: (item[1].expert or 0, item[1].start)):
        pieces.setdefault(piece.parameter, []).append(name)
    return pieces


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
    parameters = dict(decoder.named_parameters())
    for name, piece in layout(decoder.config).items():
        yield name, piece.of(parameters[piece.parameter].detach())


class ExportedWeights:
    """A decoder's `exported_tensors`, cached: views are rebuilt where a parameter has moved."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._layout = layout(decoder.config)
        names = dict.fromkeys(piece.parameter for piece in self._layout.values())
        self._paths = {name: name.split(".") for name in names}
        self._facts: list[Any] = []
        self._views: dict[str, torch.Tensor] = {}

    def views(self) -> Mapping[str, torch.Tensor]:
        parameters = {name: _parameter(self._decoder, path) for name, path in self._paths.items()}
        facts = [(p.data_ptr(), p.dtype, p.shape, p.stride()) for p in parameters.values()]
        if facts != self._facts:
            self._views = {
                name: piece.of(parameters[piece.parameter].detach()) for name, piece in self._layout.items()
            }
            self._facts = facts
        return self._views


def _parameter(module: nn.Module, path: Sequence[str]) -> torch.Tensor:
    """`get_parameter` in a tenth of its time: every update looks up hundreds."""
    for name in path[:-1]:
        found = module._modules[name]
        assert found is not None
        module = found
    parameter = module._parameters[path[-1]]
    assert parameter is not None
    return parameter


def load_policy(folder: str | Path, dtype: torch.dtype, device: str | torch.device = "cpu") -> Decoder:
    folder = Path(folder)
    config = read_config(folder)
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} holds an adapter beside a model, and some programs would add it; move "
            "adapter_config.json and its weights to a folder of their own (policy.lora.path), or remove them"
        )
    files = WeightFiles(folder)
    _check_sizes(config, files)
    decoder = Decoder(config, dtype, device)
    with errors_name(folder):
        fill(decoder, files.read)
        if config.tie_embeddings and "lm_head.weight" in files:
            _check_tied(files)
    files.report_unread(config.num_layers)
    return decoder


def stored_dtype(folder: Path) -> torch.dtype:
    """Returns the type of a folder's weights as stored; for FP8 the one that `config.json` names."""
    config = read_config(folder)
    files = WeightFiles(folder)
    stored = files.stored_types(layout(config))
    if files.fp8 is not None:
        raw = read_json(folder / "config.json")
        named = str(raw.get("dtype") or raw.get("torch_dtype")).removeprefix("torch.")
        return {**DTYPES, "float16": torch.float16}.get(named, torch.bfloat16)
    return functools.reduce(torch.promote_types, sorted(stored, key=str))


def _check_sizes(config: DecoderConfig, files: WeightFiles) -> None:
    """Raises where sizes are not the files', before memory is allocated for them."""
    last = f"model.layers.{config.num_layers - 1}.input_layernorm.weight"
    if last not in files:
        raise DamagedFile(
            f"{files.folder} lacks the tensor {last}; its config.json says num_hidden_layers = "
            f"{config.num_layers}"
        )
    for name, shape in (
        ("model.embed_tokens.weight", (config.vocab_size, config.hidden_size)),
        (last, (config.hidden_size,)),
    ):
        if name in files and files.shape(name) != shape:
            raise DamagedFile(
                f"{files.folder}: {name} has shape {files.shape(name)}, the configuration asks for {shape}"
            )


def _check_tied(files: WeightFiles) -> None:
    """Accepts a tied head that is stored as a copy of the embedding, as some trainers write it."""
    head, embedding = files.read("lm_head.weight"), files.read("model.embed_tokens.weight")
    common = torch.promote_types(head.dtype, embedding.dtype)
    if head.shape != embedding.shape or not torch.equal(head.to(common), embedding.to(common)):
        raise ValueError(
            "config.json says tie_word_embeddings: true, and lm_head.weight is not the embedding; "
            "some programs use the one, some the other: set it to false to use both, or remove lm_head.weight"
        )


def fill(decoder: Decoder, read: Callable[[str], torch.Tensor]) -> None:
    """Copies every tensor into the decoder; `read` returns one by its Hugging Face name."""
    parameters = dict(decoder.named_parameters())
    with torch.no_grad():
        for name, piece in layout(decoder.config).items():
            tensor, target = read(name), piece.of(parameters[piece.parameter])
            _check_shape(name, tensor, target)
            target.copy_(tensor)


def copy_weights(
    targets: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    left_out: Collection[str] = (),
) -> None:
    """Copies tensors into a decoder's views, as `fill` does; those on its GPU in few launches.

    Tensors that are `left_out`, because the caller copies them by other means, are checked as well.
    """
    missing = [name for name in targets if name not in weights]
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing from the new weights, first {missing[0]}")
    for name, target in targets.items():
        _check_shape(name, weights[name], target)
    copied = [name for name in targets if name not in left_out]
    with torch.no_grad():
        torch._foreach_copy_([targets[name] for name in copied], [weights[name] for name in copied])


def _check_shape(name: str, tensor: torch.Tensor, target: torch.Tensor) -> None:
    if tensor.shape != target.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, the configuration asks for {tuple(target.shape)}"
        )


def weight_reader(folder: Path) -> Callable[[str], torch.Tensor]:
    """Returns a function that reads a tensor by name, from `model.safetensors` or its index's shards."""
    return WeightFiles(folder).read


def save_policy(
    decoder: Decoder,
    folder: str | Path,
    tokenizer_from: str | Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a folder that transformers, vLLM and `load_policy` open, replacing a model in it.

    Tokenizer files are copied along from `tokenizer_from`; without it, those of the folder stay.
    """
    dtype = dtype or decoder.dtype
    _warn_of_head_dim(decoder.config)
    config = to_huggingface(decoder.config, str(dtype).removeprefix("torch."))
    patterns = WEIGHT_FILES + (TOKENIZER_FILES if tokenizer_from is not None else ())
    with replaced_files(Path(folder), patterns) as staging:
        (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _save_weights(decoder, staging, dtype, shard_bytes)
        if tokenizer_from is not None:
            copy_files(Path(tokenizer_from), TOKENIZER_FILES, staging)


def _warn_of_head_dim(config: DecoderConfig) -> None:
    if config.family == "qwen2" and config.head_dim * config.num_heads != config.hidden_size:
        warnings.warn(
            f"this qwen2 policy has head_dim {config.head_dim}, "
            f"but hidden_size {config.hidden_size} / {config.num_heads} heads is "
            f"{config.hidden_size / config.num_heads:g}: "
            "vLLM ignores head_dim for qwen2 and would compute something else without saying so",
            stacklevel=3,
        )


def _save_weights(decoder: Decoder, folder: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    """Writes one file, or shards and their index; only one of them is in memory at a time."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = total = 0
    for name, tensor in exported_tensors(decoder):
        nbytes = tensor.numel() * dtype.itemsize
        if size and size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += nbytes
        total += nbytes
    weight_map: dict[str, str] = {}
    for number, views in enumerate(shards, start=1):
        one = len(shards) == 1
        file = SINGLE_FILE if one else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: view.to("cpu", dtype).contiguous().clone() for name, view in views.items()}
        save_tensors(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
