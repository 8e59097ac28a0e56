"""A widened model computes the small model's function: same logits, same states at the same share of its
depth.
"""

import dataclasses
import json

import pytest
import torch
import transformers

from paceline.models.source import BUILTIN_POLICY
from paceline.models.widen import NOTE_FILE, layer_places, named_shape, widen, widen_folder, widened_config
from paceline.policy.attention import PackedAttention
from paceline.policy.config import DecoderConfig, RopeConfig
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy
from paceline.policy.shapes import SHAPES
from paceline.policy.tokenizer import load_tokenizer

BUILTIN = DecoderConfig("llama", 48, 128, 256, 6, 4, 2, 32, 512)  # the built-in policy's sizes
TARGETS = {
    "twice-the-head": DecoderConfig("llama", 0, 360, 700, 9, 9, 3, 64, 0),
    "same-head": DecoderConfig("llama", 0, 192, 256, 6, 8, 4, 32, 0),
    "kv-heads-copied": DecoderConfig(
        "llama", 0, 256, 512, 8, 4, 4, 96, 0
    ),  # two query heads a kv head become one
    "same-sizes": DecoderConfig("llama", 0, 128, 256, 6, 4, 2, 32, 0),
}


def logits_of(policy: Decoder, tokens: list[list[int]]) -> torch.Tensor:
    packed = PackedAttention([len(t) for t in tokens], policy.device)
    with torch.inference_mode():
        return policy.logits(policy(torch.tensor(sum(tokens, [])), packed.positions_T, packed))


def some_tokens(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in (70, 1, 33)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 2e-4)])
def test_the_builtin_policy_widened_has_its_logits(target, dtype, tolerance):
    policy = load_policy(BUILTIN_POLICY, dtype)
    wide = widen(policy, TARGETS[target])
    small_logits, wide_logits = (logits_of(p, some_tokens(48)) for p in (policy, wide))
    assert small_logits.std() > 1, "logits that say something"
    assert (small_logits - wide_logits).abs().max() < tolerance
    assert (
        wide.config.hidden_size == TARGETS[target].hidden_size
        and len(wide.layers) == TARGETS[target].num_layers
    )


@pytest.mark.parametrize("rope", [RopeConfig(5000.0), RopeConfig(10000.0, "linear", {"factor": 4.0})])
def test_biases_own_heads_and_scaled_rope(rope):
    """Everything a config of these families can switch on, with random weights."""
    config = DecoderConfig(
        "llama", 61, 48, 80, 3, 6, 2, 16, 256, 1e-2, rope, qkv_bias=True, output_bias=True, mlp_bias=True
    )
    policy = Decoder(config, torch.float64).initialise(1)
    for parameter in policy.parameters():
        parameter.data += 0.2 * torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())
        )
    wide = widen(policy, DecoderConfig("llama", 0, 112, 90, 7, 8, 4, 48, 0))
    small_logits, wide_logits = (logits_of(p, some_tokens(61)) for p in (policy, wide))
    assert small_logits.std() > 0.5 and (small_logits - wide_logits).abs().max() < 1e-9


def states(policy: Decoder) -> list[torch.Tensor]:
    """The residual stream after each layer."""
    seen = []
    hooks = [layer.register_forward_hook(lambda _, __, out: seen.append(out)) for layer in policy.layers]
    logits_of(policy, some_tokens(48))
    for hook in hooks:
        hook.remove()
    return seen


def test_captured_states_are_the_small_models():
    policy = load_policy(BUILTIN_POLICY, torch.float64)
    wide = widen(policy, TARGETS["twice-the-head"])
    small_states, wide_states = states(policy), states(wide)
    places = layer_places(6, 9)
    assert places == [0, 2, 3, 5, 6, 8], "spread evenly, first and last in place"
    for index, state in enumerate(wide_states):
        owner = max(i for i, place in enumerate(places) if place <= index)
        assert (state[:, :128] - small_states[owner]).abs().max() < 1e-9
        assert not state[:, 128:].any(), "the padding stays empty"


def test_what_nothing_sees_is_not_zero():
    """Memory and multipliers must see numbers: most of the weights are random, and the layers in between are
    too.
    """
    wide = widen(load_policy(BUILTIN_POLICY, torch.float32), TARGETS["twice-the-head"])
    for layer in wide.layers:
        for linear in (layer.attention.qkv, layer.feed_forward.gate_up):
            assert (linear.weight == 0).float().mean() < 0.5


def test_a_folder_says_what_it_is_and_transformers_agrees(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", TARGETS["twice-the-head"])
    widen_folder(BUILTIN_POLICY, "tiny", tmp_path / "wide", torch.float32)
    note = json.loads((tmp_path / "wide" / NOTE_FILE).read_text())
    assert (
        note["widened_from"] == BUILTIN_POLICY.name
        and note["to"] == "tiny"
        and note["layers_of_the_small_model"] == [0, 2, 3, 5, 6, 8]
    )
    wide, small = load_policy(tmp_path / "wide", torch.float32), load_policy(BUILTIN_POLICY, torch.float32)
    assert wide.config.eos_token_ids == small.config.eos_token_ids and wide.config.tie_embeddings
    assert load_tokenizer(tmp_path / "wide").get_vocab() == load_tokenizer(BUILTIN_POLICY).get_vocab()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float32)
    tokens = some_tokens(48)[0]
    with torch.inference_mode():
        logits = theirs(torch.tensor([tokens])).logits[0]
    assert (logits - logits_of(small, [tokens])).abs().max() < 2e-4
    with pytest.raises(ValueError, match="already holds a model"):
        widen_folder(BUILTIN_POLICY, "tiny", tmp_path / "wide", torch.float32)


@pytest.mark.parametrize("name", ["1.7b", "4b", "8b"])
def test_smollm2_fits_the_named_shapes(name):
    config = widened_config(SHAPES["smollm2-135m"], named_shape(name))
    peer = SHAPES[f"qwen3-{name}"]
    for field in ("hidden_size", "num_heads", "num_kv_heads", "head_dim"):
        assert getattr(config, field) == getattr(peer, field)
    layers, peer_layers = (
        c.num_parameters - c.vocab_size * c.hidden_size * (1 if c.tie_embeddings else 2)
        for c in (config, peer)
    )
    assert abs(layers / peer_layers - 1) < 0.005, "the weights that a step reads, head aside"
    random_weights = dataclasses.replace(SHAPES[name], norm_eps=config.norm_eps)
    assert config == random_weights, "the shape that `bench decode` fills with random weights"


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="--to '9b': must be one of .*8b"):
        named_shape("9b")
    with pytest.raises(ValueError, match="hidden_size 128 is more than 96.*head_dim 48 is no multiple of 32"):
        widened_config(BUILTIN, DecoderConfig("llama", 0, 96, 256, 6, 4, 2, 48, 0))
    with pytest.raises(ValueError, match="4 query heads on 2 kv heads do not fit 2 on 2"):
        widened_config(BUILTIN, DecoderConfig("llama", 0, 128, 256, 6, 2, 2, 32, 0))
    with pytest.raises(ValueError, match="family qwen3 cannot"):
        widened_config(SHAPES["qwen3-0.6b"], SHAPES["qwen3-8b"])
