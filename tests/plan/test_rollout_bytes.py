"""What the plan says of generation, against a real engine's tensors."""

import dataclasses

import pytest
import torch

from paceline.config import ConfigError, load_config
from paceline.drafting.eagle_folder import save_eagle
from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.engine.factory import cpu_kv_tokens, make_engine
from paceline.engine.lengths import Lengths
from paceline.models.source import BUILTIN_POLICY
from paceline.paged.cache import BLOCK_SIZE, KVCache, blocks_for, token_bytes
from paceline.plan.rollout import kv_pool_bytes, rollout_bytes
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy, save_policy
from tests.plan.shapes import SMALL_SHAPES


@pytest.mark.parametrize("drafter", ["none", "history", "eagle", "draft_model"])
def test_rollout_bytes_of_rows_and_drafter_are_the_engines(drafter, tmp_path):
    policy = load_policy(BUILTIN_POLICY, torch.float32)
    save_policy(Decoder(dataclasses.replace(policy.config, num_layers=1)).initialise(0), tmp_path / "draft")
    save_eagle(EagleHead(config_for(policy.config)).initialise(policy, 0), tmp_path / "eagle")
    path = {
        "eagle": [f"eagle_path={tmp_path / 'eagle'}"],
        "draft_model": [f"draft_model_path={tmp_path / 'draft'}"],
    }.get(drafter, [])
    speculation = [] if drafter == "none" else [f"drafters=[{drafter}]", "verify=rejection", *path]
    config = load_config(
        None, ["rollout.max_running=24", *(f"rollout.speculation.{setting}" for setting in speculation)]
    )
    engine = make_engine(
        policy, config.rollout, 512, tokenizer=None, request_tokens=Lengths.of(config, policy.config).request
    )
    forward, runner = engine.runner.forward, engine.runner
    planned = rollout_bytes(Decoder(policy.config, torch.float32, "meta"), config)
    proposals = vars(runner.proposals).values()
    assert planned.rows == sum(
        t.nbytes for t in [*engine.rows.state, *proposals, forward.cos_PC, forward.sin_PC]
    )
    caches, expected = engine.cache.num_bytes, 0
    if drafter == "history":
        history = engine.drafters["history"]
        expected = sum(t.nbytes for t in history.index)
        assert history.ring.size * 4 < expected, "the bank is in it"
    elif drafter == "eagle":
        eagle = engine.drafters["eagle"]
        tables = [eagle.head.rope_table, eagle.cos_PC, eagle.sin_PC]
        head = [
            *eagle.head.parameters(),
            *eagle.head.buffers(),
            *tables,
            eagle.features_SE,
            runner.probabilities_SKV,
        ]
        expected, caches = sum(t.nbytes for t in head), caches + eagle.cache.num_bytes
    elif drafter == "draft_model":
        model = engine.drafters["draft_model"]
        tables = [model.policy.rope_table, model.forward.cos_PC, model.forward.sin_PC]
        expected = sum(
            t.nbytes for t in [*model.policy.parameters(), *tables, model.cached_S, runner.probabilities_SKV]
        )
        expected += model.places_SK.nbytes
        caches += model.cache.num_bytes
    for own in engine.drafters.values():
        expected += sum(t.nbytes for t in [*vars(own.calibration).values(), own.trees.nodes.cells_SK])
    assert planned.drafter == expected
    assert kv_pool_bytes(planned.kv_token, 512) == caches


@pytest.mark.parametrize("tokens", [1, 16, 17, 5000])
def test_kv_pool_bytes_are_those_of_the_cache(tokens):
    shape = SMALL_SHAPES["qwen3"]
    cache = KVCache(shape, blocks_for(tokens) + 1, torch.bfloat16, torch.device("cpu"))
    per_token = token_bytes(shape.num_layers, shape.num_kv_heads, shape.head_dim, torch.bfloat16)
    assert kv_pool_bytes(per_token, tokens) == cache.num_bytes
    assert cache.num_bytes == cache.storages[torch.bfloat16].tensor.nbytes
    assert cache.num_blocks * BLOCK_SIZE >= tokens


def test_cpu_kv_pool_has_room_for_every_running_request():
    config = load_config(
        None,
        ["rollout.max_running=8", "rollout.max_tokens=20", "eval.max_tokens=30", "task.max_prompt_tokens=50"],
    )
    policy = Decoder(SMALL_SHAPES["llama"])
    assert Lengths.of(config, policy.config).request == 80
    assert cpu_kv_tokens(policy, config) == 8 * 80
    assert cpu_kv_tokens(policy, load_config(None, ["rollout.kv_tokens=300"])) == 300


def test_kv_pool_beyond_the_machines_memory_is_refused_by_name():
    policy = Decoder(SMALL_SHAPES["llama"])
    config = load_config(None, ["rollout.kv_tokens=1000000000"])
    with pytest.raises(ConfigError, match=r"rollout.kv_tokens = 1000000000: takes \d.* GB, this machine"):
        cpu_kv_tokens(policy, config)


@pytest.mark.parametrize("precision", ["fp8", "fp8+kv"])
def test_fp8_weights_and_cache_are_planned(precision):
    policy = load_policy(BUILTIN_POLICY, torch.float32)
    config, base = (
        load_config(None, ["rollout.max_running=24", f"rollout.precision={p}"]) for p in (precision, "bf16")
    )
    engine = make_engine(policy, config.rollout, 512, tokenizer=None)
    planned, plain = (rollout_bytes(Decoder(policy.config, torch.float32, "meta"), c) for c in (config, base))
    assert planned.rows - plain.rows == sum(
        matrix.values.nbytes for matrix in engine.rollout_precision.weights.matrices
    )
    assert kv_pool_bytes(planned.kv_token, 512) == engine.cache.num_bytes
