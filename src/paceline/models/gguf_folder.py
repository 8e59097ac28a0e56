"""From a GGUF file of the Llama family to a Hugging Face folder.

Weights are dequantised. GGUF stores the rows of q and k so that dimension 2i rotates with 2i + 1; Hugging
Face rotates i with i + D/2, so they are put back in order. The tokenizer is built from the file's vocabulary
and merges.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.config.extras import needs_package
from paceline.policy.config import DecoderConfig, RopeConfig
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import fill, save_policy

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CONTROL_TOKEN = 3  # GGUF's token_type of special tokens


def check_gguf() -> None:
    """Raises a ValueError with the install command if the package that reads GGUF files is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"reading GGUF files {needs_package('gguf', 'models')}")


def convert(gguf: Path, folder: Path, dtype: torch.dtype) -> None:
    check_gguf()
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise ValueError(f"{gguf.name} has architecture {fields['general.architecture']!r}; supported: llama")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(fields, tied="output.weight" not in tensors)

    def read(name: str) -> torch.Tensor:
        tensor = tensors[_gguf_name(name)]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if name.endswith("q_proj.weight"):
            return _half_split(weight, config.num_heads)
        return _half_split(weight, config.num_kv_heads) if name.endswith("k_proj.weight") else weight

    policy = Decoder(config)
    fill(policy, read)
    save_policy(policy, folder, dtype=dtype)
    _save_tokenizer(fields, folder)


def _config(fields: dict[str, Any], tied: bool) -> DecoderConfig:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return DecoderConfig(
        family="llama",
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=fields["llama.feed_forward_length"],
        num_layers=fields["llama.block_count"],
        num_heads=heads,
        num_kv_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields.get("llama.rope.dimension_count", hidden // heads),
        max_positions=fields["llama.context_length"],
        norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # stored as float32
        rope=RopeConfig(float(fields["llama.rope.freq_base"])),
        tie_embeddings=tied,
        eos_token_ids=(fields["tokenizer.ggml.eos_token_id"],),
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
    )


def _gguf_name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[module]}.{kind}"


def _half_split(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorders rows from (head, pair, which of the pair) to (head, which, pair)."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _save_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Writes a byte-level BPE whose pre-tokenizer takes digits one by one, as the `smollm` kind does."""
    kind = fields["tokenizer.ggml.pre"]
    if fields["tokenizer.ggml.model"] != "gpt2" or kind != "smollm":
        raise ValueError(
            f"tokenizer {fields['tokenizer.ggml.model']}/{kind} is not supported; supported: gpt2/smollm"
        )
    vocabulary = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges))
    digits, byte_level = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        token
        for token, token_type in zip(vocabulary, fields["tokenizer.ggml.token_type"], strict=True)
        if token_type == CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    def named(key: str) -> str:
        return vocabulary[fields[f"tokenizer.ggml.{key}_token_id"]]

    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "pad_token": named("padding"),
        "unk_token": named("unknown"),
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
