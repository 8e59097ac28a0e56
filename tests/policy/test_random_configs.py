"""Random configurations of small models: logits as transformers computes them, or a refusal with a reason."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline.policy.huggingface import load_policy
from tests.oracles import FAMILIES, small_model
from tests.policy.test_config_keys import logits, oracle_logits

# The value of a key that is taken out.
MISSING = object()
ROPE_KEYS = {
    "factor": [None, 1.0, 2.0, 3.0, 4, 0.5, MISSING],
    "rope_theta": [MISSING, MISSING, 100.0, 5000, None],
    "original_max_position_embeddings": [MISSING, MISSING, 32, 64, None],
    "low_freq_factor": [1.0, 1, 2.0, MISSING],
    "high_freq_factor": [4.0, 4, 2.0, MISSING],
    "beta_fast": [MISSING, None, 16],
    "beta_slow": [MISSING, None, 2],
    "attention_factor": [MISSING, None, 1.2],
    "mscale": [MISSING, 1.0, 0.7],
    "mscale_all_dim": [MISSING, 0.0, 0.5],
    "truncate": [MISSING, MISSING, False, True],
    "partial_rotary_factor": [MISSING, MISSING, MISSING, 1.0, 0.5],
}
KEYS_OF_KIND = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
}
OTHER_KEYS = {
    "head_dim": [MISSING, None, 8, 16],
    "num_key_value_heads": [MISSING, None, 2, 6],
    "rms_norm_eps": [MISSING, 1e-5, 1e-3],
    "max_position_embeddings": [MISSING, 128],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "use_sliding_window": [True, False],
    "sliding_window": [None, 16, 4096],
    "max_window_layers": [0, 1, 28],
    "layer_types": [None, ["full_attention"] * 3, ["sliding_attention"] * 3],
    "hidden_act": ["silu", "swish", "gelu", MISSING],
    "tie_word_embeddings": [True, False, MISSING],
    "partial_rotary_factor": [0.5, 1.0, None],
    "attention_dropout": [0.1],
    "is_causal": [True, False],
    "logit_scale": [0.5],
    "norm_topk_prob": [True, False, MISSING],
    "decoder_sparse_step": [1, 2, 0, MISSING],
    "mlp_only_layers": [None, [1], [], MISSING],
    "num_experts_per_tok": [1, 3, 8, 9],
}


def random_rope(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice([*KEYS_OF_KIND, "llama3", "yarn", "yarn"])
    wanted = ("rope_theta", "partial_rotary_factor", *KEYS_OF_KIND[kind])
    drawn = {key: draw.choice(values) for key, values in ROPE_KEYS.items()}
    said = {key: drawn[key] for key in wanted if drawn[key] is not MISSING}
    return said if draw.random() < 0.05 else {draw.choice(["rope_type", "type"]): kind, **said}


def random_changes(draw: random.Random) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "rope_parameters": draw.choice([MISSING, None, {}, random_rope(draw)]),
        "rope_scaling": draw.choice([MISSING, None, {}, random_rope(draw), random_rope(draw)]),
        "rope_theta": draw.choice([MISSING, MISSING, 1000.0, None]),
    }
    if draw.random() < 0.2:
        changes["original_max_position_embeddings"] = draw.choice([32, 64])
    return changes | {key: draw.choice(values) for key, values in OTHER_KEYS.items() if draw.random() < 0.05}


def readable_by_transformers(folder: Path) -> bool:
    """It may stumble over a null, or make up weights that are missing."""
    try:
        _, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    except Exception:
        return False
    return not info["missing_keys"] and not info["mismatched_keys"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_configs_equal_transformers_or_are_refused(seed, tmp_path):
    draw = random.Random(seed)
    for family in FAMILIES:
        small_model(family).save_pretrained(tmp_path / family)
    tokens = torch.arange(70)
    equal = refused = 0
    for number in range(60):
        family = draw.choice(list(FAMILIES))
        changes = random_changes(draw)
        raw = json.loads((tmp_path / family / "config.json").read_text()) | changes
        folder = tmp_path / f"{seed}-{number}"
        folder.mkdir()
        (folder / "model.safetensors").symlink_to(tmp_path / family / "model.safetensors")
        (folder / "config.json").write_text(
            json.dumps({key: value for key, value in raw.items() if value is not MISSING})
        )
        try:
            load_policy(folder, torch.float64)
        except ValueError as error:
            assert str(folder) in str(error)
            refused += 1
            continue
        if readable_by_transformers(folder):
            torch.testing.assert_close(
                logits(folder, tokens), oracle_logits(folder, tokens), rtol=0, atol=1e-9, msg=str(changes)
            )
            equal += 1
    assert equal > 10 and refused > 10
