"""Eagle heads as folders: the Hugging Face layout that vLLM and SGLang load for `eagle3`.

    config.json         a one-layer Llama, `draft_vocab_size`, and which of the policy's layers are captured
    model.safetensors   fc, midlayer.*, norm, lm_head; with a reduced vocabulary also
                        d2t (target id = draft id + d2t) and t2d (whether a target id can be drafted)

Captured layers are written twice, because the two engines count differently.
`eagle_aux_hidden_state_layer_ids` at the top is what vLLM prefers: i means the states that enter layer i, as
in this project. The same key within `eagle_config` is what SGLang reads: there i means the states that leave
layer i. A folder with the second alone is ambiguous, and refused unless the layers are given.

What enters layer 0 is the embedding, which vLLM captures. SGLang adds one to the numbers it reads, so there
it is -1: its Qwen models capture the embedding then and its Llama raises (read in its code); any other number
would be other states, silently.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from paceline.drafting.eagle_head import EagleConfig, EagleHead
from paceline.policy.config import DecoderConfig, from_huggingface, to_huggingface
from paceline.policy.decoder import Decoder, not_finite
from paceline.policy.files import DamagedFile, errors_name, read_json
from paceline.policy.huggingface import Slice
from paceline.policy.model_files import WEIGHT_FILES, replaced_files, save_tensors

# The heads that are shipped with this package, by name.
BUILTIN_EAGLE = Path(__file__).parents[1] / "assets" / "builtin-eagle"
BUILTIN_EAGLES = {"builtin-eagle": BUILTIN_EAGLE}

# The architecture that is written, and those that are read.
ARCHITECTURE = "LlamaForCausalLMEagle3"
ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM")
# The key of the captured layers.
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Variants of the head that compute something else; each key's only supported value.
SUPPORTED_VALUES = {
    "num_hidden_layers": 1,
    "norm_before_residual": False,
    "norm_output": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "attention_bias": False,
    "mlp_bias": False,
    "logit_scale": 1.0,
    "use_aux_hidden_state": True,
    "parallel_drafting": False,
}


def eagle_folder(name: str) -> Path:
    """Returns the folder of a shipped head, or the path itself."""
    folder = BUILTIN_EAGLES.get(name, Path(name))
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{name!r} is not an eagle head's folder with a config.json; "
            f"shipped are: {', '.join(BUILTIN_EAGLES)}"
        )
    return folder


def holds_other_model(folder: Path) -> bool:
    """Returns whether a folder holds a policy, an adapter or any model that is not an eagle head."""
    if (folder / "adapter_config.json").exists():
        return True
    if not (folder / "config.json").exists():
        return False
    try:
        return not _is_eagle(read_json(folder / "config.json").get("architectures"))
    except DamagedFile:
        return True


def head_tensors(head: EagleHead, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Returns copies of a head's tensors on the host, under the names that its folder has."""
    dtype = dtype or head.fc.weight.dtype
    parameters = dict(head.named_parameters())
    tensors = {
        name: piece.of(parameters[piece.parameter].detach()).to("cpu", dtype).contiguous().clone()
        for name, piece in _layout(head.config).items()
    }
    # vLLM knows no map where the vocabularies are the same.
    if head.config.draft_vocab < head.config.layer.vocab_size:
        draft_to_target = head.draft_to_target.cpu()
        tensors["d2t"] = draft_to_target - torch.arange(head.config.draft_vocab)
        tensors["t2d"] = torch.zeros(head.config.layer.vocab_size, dtype=torch.bool).index_fill(
            0, draft_to_target, True
        )
    return tensors


def save_eagle(head: EagleHead, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Writes a folder that vLLM, SGLang and `load_eagle` open."""
    dtype = dtype or head.fc.weight.dtype
    tensors = head_tensors(head, dtype)
    with replaced_files(Path(folder), WEIGHT_FILES) as staging:
        (staging / "config.json").write_text(json.dumps(_to_huggingface(head.config, dtype), indent=2) + "\n")
        save_tensors(tensors, staging / "model.safetensors")


def load_eagle(
    folder: str | Path,
    policy: Decoder,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    captured_layers: tuple[int, ...] = (),
) -> EagleHead:
    """Returns the head in `folder`, if it was made for this policy.

    `captured_layers` overrides what its configuration says.
    """
    folder = eagle_folder(str(folder))
    head = EagleHead(_read_config(folder, policy.config, captured_layers), dtype, device)
    read = _reader(folder)
    _check_embedding(folder, read, policy)
    parameters = dict(head.named_parameters())
    with torch.no_grad():
        for name, piece in _layout(head.config).items():
            tensor, target = read(name), piece.of(parameters[piece.parameter])
            if tensor is None:
                raise ValueError(f"{folder} lacks the tensor {name}")
            if tensor.shape != target.shape:
                raise ValueError(
                    f"{folder}: {name} has shape {tuple(tensor.shape)}, "
                    f"its config.json asks for {tuple(target.shape)}"
                )
            _check_type(folder, name, tensor)
            target.copy_(tensor)
        head.draft_to_target.copy_(_read_vocabulary(folder, read, head.config))
    if harmed := not_finite(head):
        raise ValueError(
            f"{folder}: {len(harmed)} of the head's parameters are not finite, first {harmed[0]}"
        )
    return head


def stored_dtype(folder: str | Path) -> torch.dtype:
    """Returns the type in which a folder keeps its head: that of the largest matrix every head has."""
    folder = eagle_folder(str(folder))
    tensor = _reader(folder)("fc.weight")
    if tensor is None:
        raise ValueError(f"{folder} lacks the tensor fc.weight")
    _check_type(folder, "fc.weight", tensor)
    return tensor.dtype


def _check_type(folder: Path, name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ValueError(f"{folder}: {name} is {tensor.dtype}; a quantised head is not supported")


def head_for(path: str, policy: DecoderConfig) -> str | None:
    """Returns `path`, or for `auto` the shipped head that fits a policy of this shape; None if none does."""
    return path if path != "auto" else next((name for name in BUILTIN_EAGLES if _fits(name, policy)), None)


def _fits(name: str, policy: DecoderConfig) -> bool:
    try:
        read_eagle_config(name, policy)
    except ValueError:
        return False
    return True


def read_eagle_config(name: str, policy: DecoderConfig) -> EagleConfig:
    """Returns the shape of a head, if it was made for this policy."""
    return _read_config(eagle_folder(name), policy, ())


def _layout(config: EagleConfig) -> dict[str, Slice]:
    """Every tensor name of the folder and where it lies in the head."""
    layer = config.layer
    size = layer.hidden_size
    q = layer.num_heads * layer.head_dim
    kv = layer.num_kv_heads * layer.head_dim
    f = layer.intermediate_size
    return {
        "fc.weight": Slice("fc.weight", 0, size),
        "midlayer.input_layernorm.weight": Slice("embedding_norm.weight", 0, size),
        "midlayer.hidden_norm.weight": Slice("hidden_norm.weight", 0, size),
        "midlayer.self_attn.q_proj.weight": Slice("attention.qkv.weight", 0, q),
        "midlayer.self_attn.k_proj.weight": Slice("attention.qkv.weight", q, q + kv),
        "midlayer.self_attn.v_proj.weight": Slice("attention.qkv.weight", q + kv, q + 2 * kv),
        "midlayer.self_attn.o_proj.weight": Slice("attention.output.weight", 0, size),
        "midlayer.post_attention_layernorm.weight": Slice("feed_forward_norm.weight", 0, size),
        "midlayer.mlp.gate_proj.weight": Slice("feed_forward.gate_up.weight", 0, f),
        "midlayer.mlp.up_proj.weight": Slice("feed_forward.gate_up.weight", f, 2 * f),
        "midlayer.mlp.down_proj.weight": Slice("feed_forward.down.weight", 0, size),
        "norm.weight": Slice("norm.weight", 0, size),
        "lm_head.weight": Slice("head.weight", 0, config.draft_vocab),
    }


def _to_huggingface(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    out = to_huggingface(config.layer, str(dtype).removeprefix("torch."))
    return out | {
        "architectures": [ARCHITECTURE],
        "draft_vocab_size": config.draft_vocab,
        LAYER_IDS: list(config.captured_layers),
        "eagle_config": {
            LAYER_IDS: [layer - 1 for layer in config.captured_layers],
            "use_aux_hidden_state": True,
        },
    }


def _read_config(folder: Path, policy: DecoderConfig, captured_layers: tuple[int, ...]) -> EagleConfig:
    with errors_name(folder / "config.json"):
        config = _from_huggingface(read_json(folder / "config.json"), policy, captured_layers)
        config.check_against(policy)
    return config


def _is_eagle(architectures: Any) -> bool:
    return isinstance(architectures, list) and bool(architectures) and architectures[0] in ARCHITECTURES


def _from_huggingface(
    raw: dict[str, Any], policy: DecoderConfig, captured_layers: tuple[int, ...]
) -> EagleConfig:
    eagle = raw.get("eagle_config") or {}
    if not isinstance(eagle, dict):
        raise ValueError(f"eagle_config = {eagle!r}: must be an object")
    architectures = raw.get("architectures") or [None]
    if not _is_eagle(architectures):
        raise ValueError(
            f"architectures = {architectures!r}; an eagle head has one of {', '.join(ARCHITECTURES)}"
        )
    for key, supported in SUPPORTED_VALUES.items():
        value = eagle.get(key, raw.get(key, supported))
        if value != supported:
            raise ValueError(
                f"{key} = {value!r} is a variant of the head that is not supported; supported: {supported!r}"
            )
    target_size = raw.get("target_hidden_size", raw["hidden_size"])
    if target_size != raw["hidden_size"]:
        raise ValueError(
            f"target_hidden_size = {target_size}; "
            f"supported is the head's own hidden_size, {raw['hidden_size']}"
        )
    # Positions up to the policy's own limit: many published heads claim 2048, which would clamp or repeat
    # positions beyond.
    layer = replace(
        from_huggingface(raw | {"model_type": "llama"}),
        max_positions=policy.max_positions,
        tie_embeddings=False,
    )
    layers = captured_layers or _captured_layers(raw, eagle, policy.num_layers)
    draft_vocab = raw.get("draft_vocab_size") or layer.vocab_size
    if type(draft_vocab) is not int:
        raise ValueError(f"draft_vocab_size = {draft_vocab!r}: must be a whole number")
    return EagleConfig(layer, layers, draft_vocab)


def _captured_layers(raw: dict[str, Any], eagle: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    if raw.get(LAYER_IDS):
        if not _are_numbers(raw[LAYER_IDS]):
            raise ValueError(
                f"{LAYER_IDS} = {raw[LAYER_IDS]!r}: must be a list of layers' numbers, such as [2, 14, 25]"
            )
        return tuple(raw[LAYER_IDS])
    ids = eagle.get(LAYER_IDS)
    if ids and not _are_numbers(ids):
        raise ValueError(f"eagle_config.{LAYER_IDS} = {ids!r}: must be a list of layers' numbers")
    # Only SGLang has a meaning for a negative number.
    if ids and min(ids) < 0:
        return tuple(i + 1 for i in ids)
    if ids:
        entering = ",".join(str(i) for i in ids)
        leaving = ",".join(str(i + 1) for i in ids)
        raise ValueError(
            f"eagle_config.{LAYER_IDS} = {ids} is read in two ways, "
            "and the key at the top that decides is missing. "
            f"`paceline drafter import --layers {entering}` takes it as vLLM does, "
            f"`--layers {leaving}` as SGLang does"
        )
    if num_layers < 8:
        raise ValueError(
            f"it names no {LAYER_IDS}, "
            f"and the usual choice needs a policy of 8 layers or more, not {num_layers}; "
            "say which with `paceline drafter import --layers`"
        )
    # The default of both engines.
    return 2, num_layers // 2, num_layers - 3


def _are_numbers(ids: Any) -> bool:
    return isinstance(ids, list) and all(type(i) is int for i in ids)


def _reader(folder: Path) -> Callable[[str], torch.Tensor | None]:
    """Finds a tensor under any of the names that are in use for it; None where there is none of them."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with errors_name(file):
            tensors |= load_file(file)
    if not tensors and (folder / "pytorch_model.bin").is_file():
        try:
            tensors = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        except Exception as error:  # unpickling fails in many ways
            raise DamagedFile(f"{folder / 'pytorch_model.bin'} is not readable: {error}") from None
    if not tensors:
        raise FileNotFoundError(f"{folder} holds neither safetensors nor pytorch_model.bin")

    def find(name: str) -> torch.Tensor | None:
        names = (name, name.replace("midlayer.", "layers.0."))
        return next(
            (tensors[prefix + n] for prefix in ("", "model.") for n in names if prefix + n in tensors), None
        )

    return find


def _read_vocabulary(
    folder: Path, read: Callable[[str], torch.Tensor | None], config: EagleConfig
) -> torch.Tensor:
    every_V = torch.arange(config.draft_vocab)
    offsets, chosen = read("d2t"), read("t2d")
    if offsets is None:
        if config.draft_vocab < config.layer.vocab_size:
            raise ValueError(
                f"{folder} lacks the tensor d2t, and draft_vocab_size = {config.draft_vocab} "
                f"is not vocab_size = {config.layer.vocab_size}"
            )
        return every_V
    if offsets.shape != every_V.shape:
        raise ValueError(
            f"{folder}: d2t has shape {tuple(offsets.shape)}, draft_vocab_size is {config.draft_vocab}"
        )
    targets = every_V + offsets.long()
    if targets.min() < 0 or targets.max() >= config.layer.vocab_size or len(targets.unique()) < len(targets):
        raise ValueError(
            f"{folder}: d2t must send each draft id to a token of its own, "
            f"below vocab_size = {config.layer.vocab_size}"
        )
    if chosen is not None and not torch.equal(chosen.bool().nonzero().flatten(), targets.sort().values):
        raise ValueError(f"{folder}: d2t and t2d disagree about which tokens the draft vocabulary holds")
    return targets


def _check_embedding(folder: Path, read: Callable[[str], torch.Tensor | None], policy: Decoder) -> None:
    """A head may bring a copy of the policy's embedding, as some trainers write it, but no other."""
    embedding = read("embed_tokens.weight")
    if embedding is None:
        return
    ours = policy.embedding.weight.detach()
    if embedding.shape != ours.shape:
        raise ValueError(
            f"{folder}: embed_tokens.weight has shape {tuple(embedding.shape)}, "
            f"the policy's embedding {tuple(ours.shape)}"
        )
    narrow = embedding.dtype if embedding.element_size() < ours.element_size() else ours.dtype
    if not torch.equal(embedding.to(ours.device, narrow), ours.to(narrow)):
        raise ValueError(
            f"{folder}: embed_tokens.weight differs from the policy's embedding; "
            "a head with an embedding of its own is not supported. "
            "Was it trained for another policy? If the policy has learnt since, "
            "remove embed_tokens.weight: the policy's own is used then"
        )
