"""Writes a large model with a small one's function: real acceptance and lengths at a large model's cost.

    python benchmarks/widen.py POLICY OUT --to 8b [--head HEAD HEAD_OUT] [--dtype bfloat16]

OUT is an ordinary Hugging Face folder: a run takes it as `policy.path`, and HEAD_OUT, the eagle head HEAD
widened with its policy, as `rollout.speculation.eagle_path`. Where OUT holds what this very command would
write, it is read instead. The tensors are made and kept on the GPU where there is one (15 GB at 8B).

Where no weights of a size are to be had, random ones give the right step time and meaningless text. This puts
a trained small model inside the tensors of a larger shape instead:

    residual stream   [ small | 0 ]; RMSNorm's mean now runs over the padded width: weights times sqrt(E/E'),
                      epsilon times E/E'
    one head of 2D    pair j of the small head at pair 2j, which turns at the same frequency; q times sqrt(2)
                      for the 1/sqrt(2D)
    kv heads          each with its own query heads; one that serves more than the shape allows is there twice
    layers            the small one's spread evenly, first and last in place; between them layers that add
                      nothing, so that the states captured at a given share of the depth are the small model's

Weights that nothing can see (inputs from the padding, further heads and feed-forward columns, the layers
between) are random, so that memory and arithmetic see numbers and not zeros; what writes into the residual
stream is zero outside the small model. A head is trained on the small policy, which is cheap; widened it
proposes the same tokens at the cost of the wide policy's head.
"""

import argparse
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from paceline.device import best_device
from paceline.drafting.eagle_folder import eagle_folder, load_eagle, save_eagle
from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.drafting.model_card import ACCEPTANCE_FILE, CARD_FILE
from paceline.models.source import policy_folder
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Attention, Decoder, DecoderLayer, FeedForward
from paceline.policy.files import read_json
from paceline.policy.huggingface import DTYPES, load_policy, save_policy
from paceline.policy.model_files import copy_files
from paceline.policy.shapes import SHAPES

NOTE_FILE = "widened.json"  # in the folder of a widened model: its size is not its ability


def named_shape(name: str) -> DecoderConfig:
    dense = [key for key, shape in SHAPES.items() if not shape.num_experts]
    if name not in dense:
        raise ValueError(f"--to {name!r}: must be one of {', '.join(dense)}")
    return SHAPES[name]


def widened_config(small: DecoderConfig, shape: DecoderConfig) -> DecoderConfig:
    """Returns `shape` with the small model's vocabulary, positions, end tokens and tied embeddings."""
    if small.family not in ("llama", "qwen2"):
        raise ValueError(
            f"a model of family {small.family} cannot be widened: only llama and qwen2 (no QK-norm, no "
            "experts) can"
        )
    problems = [
        f"{field} {getattr(small, field)} is more than {getattr(shape, field)}"
        for field in ("hidden_size", "intermediate_size", "num_layers")
        if getattr(small, field) > getattr(shape, field)
    ]
    if shape.head_dim % small.head_dim:
        problems.append(
            f"head_dim {shape.head_dim} is no multiple of {small.head_dim}, so no rotary pair turns at the "
            "same frequency"
        )
    elif small.rope.kind == "yarn" and shape.head_dim != small.head_dim:
        problems.append("YaRN's frequencies depend on head_dim")
    if small.num_kv_heads * _kv_copies(small, shape) > shape.num_kv_heads:
        asked = f"{small.num_heads} query heads on {small.num_kv_heads} kv heads"
        problems.append(f"{asked} do not fit {shape.num_heads} on {shape.num_kv_heads}")
    if problems:
        raise ValueError(f"this model does not fit the shape: {'; '.join(problems)}")
    return dataclasses.replace(
        small,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        norm_eps=small.norm_eps * small.hidden_size / shape.hidden_size,
    )


def layer_places(small_layers: int, wide_layers: int) -> list[int]:
    """Returns which of the wide model's layers hold the small one's."""
    if small_layers == 1:
        return [0]
    return [round(i * (wide_layers - 1) / (small_layers - 1)) for i in range(small_layers)]


@torch.no_grad()
def widen(policy: Decoder, shape: DecoderConfig, dtype: torch.dtype | None = None) -> Decoder:
    """Returns a decoder of `shape`'s sizes with `policy`'s logits, up to rounding.

    Two factors are no powers of two, so bf16 rounds them once.
    """
    small, config = policy.config, widened_config(policy.config, shape)
    wide = Decoder(config, dtype or policy.dtype, policy.device).initialise(0)
    for layer in wide.layers:
        _silence(layer)
    placement = Placement.of(small, config, wide.device)
    for index, layer in zip(layer_places(small.num_layers, config.num_layers), policy.layers, strict=True):
        _place_layer(wide.layers[index], layer, placement)
    for target, source in (
        (wide.embedding.weight, policy.embedding.weight),
        (wide.head.weight, policy.head.weight),
    ):
        target.zero_()
        target[:, : small.hidden_size] = source.to(target)
    _place_norm(wide.norm.weight, policy.norm.weight, placement)
    return wide


@dataclass(frozen=True)
class Placement:
    """Where the small model's rows and columns lie in the wide one's matrices."""

    residual: torch.Tensor  # dimensions of the wide residual stream that are the small one's
    query_rows: torch.Tensor  # of the wide q, for each row of the small one's
    query_heads: torch.Tensor  # wide query heads that are the small model's
    kv_rows: torch.Tensor  # of the wide k or v, for each row of `kv_sources`
    kv_sources: torch.Tensor  # rows of the small k or v; more than once where a kv head is copied
    norm_scale: float
    query_scale: float

    @classmethod
    def of(cls, small: DecoderConfig, wide: DecoderConfig, device: torch.device) -> "Placement":
        """Returns where a model of the shape `small` lies in one of the shape `wide`."""
        group, wide_group = small.num_heads // small.num_kv_heads, wide.num_heads // wide.num_kv_heads
        copies = _kv_copies(small, wide)
        query_heads, kv_heads, kv_origins = [], [], []
        for kv in range(small.num_kv_heads):
            for copy in range(copies):
                kv_heads.append(kv * copies + copy)
                kv_origins.append(kv)
            query_heads += [
                (kv * copies + member // wide_group) * wide_group + member % wide_group
                for member in range(group)
            ]
        # Dimension i rotates with i + D/2, the pairs' frequencies fall with i as theta^(-2i/D): D'/D times
        # further out in a head of D'.
        stride = wide.head_dim // small.head_dim
        low = torch.arange(small.head_dim // 2) * stride
        dims = torch.cat((low, low + wide.head_dim // 2))

        def rows(heads: list[int], head_dims: torch.Tensor, head_dim: int) -> torch.Tensor:
            return (torch.tensor(heads).unsqueeze(1) * head_dim + head_dims).flatten().to(device)

        return cls(
            residual=torch.arange(small.hidden_size, device=device),
            query_rows=rows(query_heads, dims, wide.head_dim),
            query_heads=torch.tensor(query_heads, device=device),
            kv_rows=rows(kv_heads, dims, wide.head_dim),
            kv_sources=rows(kv_origins, torch.arange(small.head_dim), small.head_dim),
            norm_scale=math.sqrt(small.hidden_size / wide.hidden_size),
            query_scale=math.sqrt(wide.head_dim / small.head_dim),
        )


def _kv_copies(small: DecoderConfig, wide: DecoderConfig) -> int:
    return math.ceil((small.num_heads // small.num_kv_heads) / (wide.num_heads // wide.num_kv_heads))


def _silence(layer: DecoderLayer) -> None:
    """Makes a layer add nothing to the residual stream, whatever it computes."""
    for linear in (layer.attention.output, layer.feed_forward.down):
        linear.weight.zero_()


def _place_layer(target: DecoderLayer, source: DecoderLayer, at: Placement) -> None:
    _place_norm(target.attention_norm.weight, source.attention_norm.weight, at)
    _place_norm(target.feed_forward_norm.weight, source.feed_forward_norm.weight, at)
    _place_attention(target.attention, source.attention, at, at.residual)
    _place_feed_forward(target.feed_forward, source.feed_forward, at)


def _place_attention(attention: Attention, small: Attention, at: Placement, inputs: torch.Tensor) -> None:
    """Places a small attention; `inputs` are the wide columns that its inputs are."""
    for (q, k, v), (small_q, small_k, small_v) in zip(
        _parts(attention.qkv, *_qkv(attention)), _parts(small.qkv, *_qkv(small)), strict=True
    ):
        # The small heads' further dimensions must score nothing; zeros in q alone see to that.
        q.unflatten(0, (-1, attention.head_dim))[at.query_heads] = 0
        _place(q, small_q.double() * at.query_scale, at.query_rows, inputs)
        _place(k, small_k[at.kv_sources], at.kv_rows, inputs)
        _place(v, small_v[at.kv_sources], at.kv_rows, inputs)
    for (out,), (small_out,) in zip(_parts(attention.output), _parts(small.output), strict=True):
        _place(out, small_out, at.residual, at.query_rows)


def _place_feed_forward(forward: FeedForward, small: FeedForward, at: Placement) -> None:
    inner = torch.arange(small.down.in_features, device=at.residual.device)
    for wide_parts, parts in zip(
        _parts(forward.gate_up, *[forward.down.in_features] * 2),
        _parts(small.gate_up, *[len(inner)] * 2),
        strict=True,
    ):
        for wide_part, part in zip(wide_parts, parts, strict=True):
            _place(wide_part, part, inner, at.residual)
    for (down,), (small_down,) in zip(_parts(forward.down), _parts(small.down), strict=True):
        _place(down, small_down, at.residual, inner)


def _qkv(attention: Attention) -> tuple[int, int, int]:
    return (
        attention.heads * attention.head_dim,
        attention.kv_heads * attention.head_dim,
        attention.kv_heads * attention.head_dim,
    )


def _parts(linear: nn.Linear, *sizes: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields the linear's weight and, where there is one, its bias, each cut into runs of rows."""
    for tensor in (linear.weight, linear.bias):
        if tensor is not None:
            yield tensor.split(sizes or tensor.shape[0])


def _place(target: torch.Tensor, source: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """Writes `source` into the rows and columns of `target`; into its rows if that is a vector."""
    where = (rows.unsqueeze(1), columns) if target.ndim == 2 else (rows,)
    target.index_put_(where, source.to(target))


def _place_norm(target: torch.Tensor, source: torch.Tensor, at: Placement) -> None:
    """Places a small norm's weight, scaled for the mean over the wider stream."""
    target[at.residual] = (source.double() * at.norm_scale).to(target)


@torch.no_grad()
def widen_eagle(head: EagleHead, small: DecoderConfig, wide_policy: Decoder) -> EagleHead:
    """Returns a head that drafts for `wide_policy` as `head` does for the policy it was widened from.

    `small` is that policy's configuration.
    """
    head.config.check_against(small)
    wide, dtype, device = wide_policy.config, wide_policy.dtype, wide_policy.device
    places = layer_places(small.num_layers, wide.num_layers)
    config = config_for(wide, tuple(places[i] for i in head.config.captured_layers), head.config.draft_vocab)
    out = EagleHead(config, dtype, device)
    out.draft_to_target.copy_(head.draft_to_target)
    out.initialise(wide_policy, seed=0)
    at = Placement.of(head.config.layer, config.layer, device)
    # What writes into the residual stream, or reads a padded one into scores, is zero outside the small head.
    for linear in (out.fc, out.attention.output, out.feed_forward.down, out.head):
        linear.weight.zero_()
    parts = len(config.captured_layers)
    _place(out.fc.weight, head.fc.weight, at.residual, _columns(at.residual, parts, config.layer.hidden_size))
    for name in ("embedding_norm", "hidden_norm", "feed_forward_norm", "norm"):
        _place_norm(getattr(out, name).weight, getattr(head, name).weight, at)
    _place_attention(out.attention, head.attention, at, _columns(at.residual, 2, config.layer.hidden_size))
    _place_feed_forward(out.feed_forward, head.feed_forward, at)
    out.head.weight[:, at.residual] = head.head.weight.to(out.head.weight)
    return out


def _columns(residual: torch.Tensor, parts: int, width: int) -> torch.Tensor:
    """Returns where the small model's dimensions lie in several residual streams side by side."""
    return torch.cat([residual + part * width for part in range(parts)])


def write_policy(small: Decoder, source: Path, shape_name: str, out: Path, dtype: torch.dtype) -> Decoder:
    """Writes the policy of `source` widened, with its tokenizer and a note of what it is, and returns it."""
    shape = named_shape(shape_name)
    config = widened_config(small.config, shape)
    note = {
        "widened_from": source.name,
        "weights_sha256": _digest(source),
        "to": shape_name,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": config.num_parameters,
        "meaning": "computes the function of the model it was widened from; only its cost is its size's",
        "layers_of_the_small_model": layer_places(small.config.num_layers, config.num_layers),
    }
    if (out / "config.json").exists():
        if not (out / NOTE_FILE).exists() or read_json(out / NOTE_FILE) != note:
            raise ValueError(f"{out} already holds another model; remove it or choose another folder")
        return load_policy(out, dtype, small.device)
    wide = widen(small, shape, dtype)
    out.mkdir(parents=True, exist_ok=True)
    (out / NOTE_FILE).write_text(json.dumps(note, indent=2) + "\n")
    save_policy(wide, out, tokenizer_from=source)
    return wide


def write_head(head: Path, small: Decoder, wide: Decoder, out: Path) -> None:
    """Writes the small policy's head widened, with the card that sets the depth of its trees."""
    if (out / "config.json").exists():
        raise ValueError(f"{out} already holds a model; remove it or choose another folder")
    loaded = load_eagle(head, small, torch.float32, small.device)
    save_eagle(widen_eagle(loaded, small.config, wide), out)
    copy_files(head, (CARD_FILE, ACCEPTANCE_FILE), out)


def _digest(folder: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("policy", help="the small model: a Hugging Face folder or a shipped policy's name")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--to", required=True, metavar="SHAPE", help="1.7b, 4b, 8b or another dense shape")
    parser.add_argument("--head", nargs=2, metavar=("HEAD", "HEAD_OUT"), help="its eagle head, and where to")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options = parser.parse_args(arguments)
    try:
        source = policy_folder(options.policy)
        small = load_policy(source, torch.float32, best_device())
        wide = write_policy(small, source, options.to, options.out, DTYPES[options.dtype])
        if options.head:
            head, head_out = options.head
            write_head(eagle_folder(head), small, wide, Path(head_out))
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    print(f"{options.out}: {wide.config.num_parameters / 1e9:.2f} B parameters")


if __name__ == "__main__":
    main()
