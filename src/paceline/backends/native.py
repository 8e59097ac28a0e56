"""The native engine as a backend: sizes its KV pool from the recipe and the machine."""

import torch
from tokenizers import Tokenizer

from paceline.backends.drafters import make_drafter
from paceline.config import ConfigError, RolloutConfig
from paceline.engine.engine import Engine, EngineSettings
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.paged.cache import token_bytes
from paceline.policy.decoder import Decoder

GPU_SHARE = 0.5  # of the memory that is free when the engine starts; the rest is for learning
CPU_BYTES = 4 << 30


def make_native(policy: Decoder, rollout: RolloutConfig, longest_response: int, tokenizer: Tokenizer) -> Engine:
    settings = EngineSettings(
        max_running=rollout.max_running,
        kv_tokens=rollout.kv_tokens or default_kv_tokens(policy, rollout.max_running, longest_response),
        prefill_tokens=rollout.prefill_tokens,
        admission=rollout.admission,
        deterministic=rollout.deterministic,
        verify=rollout.speculation.verify,
    )
    speculation = rollout.speculation
    if speculation.drafter == "none":
        return Engine(policy, settings, tokenizer)
    pacer = FixedPacer(Strategy(speculation.drafter, speculation.tokens), speculation.max_running)
    return Engine(policy, settings, tokenizer, [make_drafter(speculation.drafter, policy, speculation)], pacer)


def default_kv_tokens(policy: Decoder, max_running: int, longest_response: int) -> int:
    """Room for every running request at full length, or what the memory allows if that is less."""
    config = policy.config
    per_token = token_bytes(config.num_layers, config.num_kv_heads, config.head_dim, policy.dtype)
    if policy.device.type == "cuda":
        available = int(torch.cuda.mem_get_info(policy.device)[0] * GPU_SHARE)
    else:
        available = CPU_BYTES
    fits = available // per_token
    one_request = min(config.max_positions, 2 * longest_response)
    if fits < one_request:
        raise ConfigError(f"rollout.kv_tokens: {fits} KV tokens fit the memory, one request may need {one_request}; lower rollout.max_tokens")
    return min(fits, max_running * one_request)
