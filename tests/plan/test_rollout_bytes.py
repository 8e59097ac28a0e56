"""What the plan says of generation, against a real engine's tensors."""

import pytest
import torch

from paceline.backends.native import cpu_kv_tokens, make_native
from paceline.config import load_config
from paceline.paged.cache import BLOCK_SIZE, KVCache, blocks_for
from paceline.plan.lengths import Lengths
from paceline.plan.rollout import kv_pool_bytes, rollout_bytes, step_bytes
from paceline.policy.decoder import Decoder
from tests.plan.shapes import SMALL_SHAPES


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_rows_and_bank_are_the_engines(name):
    shape = SMALL_SHAPES[name]
    config = load_config(None, ["rollout.max_running=24", "rollout.speculation.drafter=history"])
    policy = Decoder(shape).initialise(0)
    engine = make_native(policy, config.rollout, 512, tokenizer=None)
    rows, forward, drafter = engine.rows, engine.runner.forward, engine.drafters["history"]
    row_tensors = [*vars(rows.state).values(), rows.top_k, rows.top_p, rows.min_p, engine.runner.proposals_SK, forward.cos_PC, forward.sin_PC]
    planned = rollout_bytes(shape, config, torch.float32)
    assert planned.rows == sum(t.nbytes for t in row_tensors)
    assert planned.drafter == drafter.bank_NW.nbytes + drafter.bank_length_N.nbytes + drafter.sources_SC.nbytes
    assert rollout_bytes(shape, load_config(None), torch.float32).drafter == 0


@pytest.mark.parametrize("tokens", [1, 16, 17, 5000])
def test_pool_is_the_caches(tokens):
    shape = SMALL_SHAPES["qwen3"]
    cache = KVCache(shape, blocks_for(tokens) + 1, torch.bfloat16, torch.device("cpu"))
    assert kv_pool_bytes(shape, torch.bfloat16, tokens) == cache.num_bytes == cache.storage_L2NBHD.nbytes
    assert cache.shape[2] * BLOCK_SIZE >= tokens


def test_a_step_holds_its_logits():
    shape = SMALL_SHAPES["llama"]
    assert step_bytes(shape, 32, torch.bfloat16, truncates=False) == 32 * (500 * 4 + 2 * 2 * 64)
    assert step_bytes(shape, 32, torch.bfloat16, truncates=True) > 10 * 32 * 500 * 4


def test_cpu_pool_has_room_for_everybody():
    config = load_config(None, ["rollout.max_running=8", "rollout.max_tokens=20", "eval.max_tokens=30", "task.max_prompt_tokens=50"])
    policy = Decoder(SMALL_SHAPES["llama"])
    assert Lengths.of(config, policy.config).request == 80
    assert cpu_kv_tokens(policy, config) == 8 * 80
    assert cpu_kv_tokens(policy, load_config(None, ["rollout.kv_tokens=123"])) == 123
