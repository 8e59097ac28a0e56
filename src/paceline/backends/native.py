"""The native engine as a backend: sizes its KV pool from the recipe and the machine."""

import torch
from tokenizers import Tokenizer

from paceline.backends.drafters import make_drafter
from paceline.config import ConfigError, RolloutConfig, SpeculationConfig
from paceline.drafting.base import Drafter
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.graphs import buckets_up_to
from paceline.pacing.adaptive import AdaptivePacer, PacingSettings
from paceline.pacing.strategy import FixedPacer, Pacer, Strategy
from paceline.paged.cache import token_bytes
from paceline.policy.decoder import Decoder

GPU_SHARE = 0.5  # of the memory that is free when the engine starts; the rest is for learning
CPU_BYTES = 4 << 30


def make_native(policy: Decoder, rollout: RolloutConfig, longest_response: int, tokenizer: Tokenizer, seed: int = 0) -> Engine:
    settings = EngineSettings(
        max_running=rollout.max_running,
        kv_tokens=rollout.kv_tokens or default_kv_tokens(policy, rollout.max_running, longest_response),
        prefill_tokens=rollout.prefill_tokens,
        admission=rollout.admission,
        deterministic=rollout.deterministic,
        verify=rollout.speculation.verify,
        graph_memory=int(rollout.graph_memory_gb * 1e9),
    )
    speculation = rollout.speculation
    drafters = [make_drafter(name, policy, speculation) for name in speculation.drafters]
    return Engine(policy, settings, tokenizer, drafters, make_pacer(speculation, drafters, rollout.max_running, seed) if drafters else None)


def make_pacer(speculation: SpeculationConfig, drafters: list[Drafter], max_running: int, seed: int) -> Pacer:
    if speculation.pacing == "fixed":
        return FixedPacer(Strategy(drafters[0].name, min(speculation.tokens, drafters[0].max_tokens)), speculation.max_running or max_running)
    strategies = [Strategy(drafter.name, count) for drafter in drafters for count in counts_up_to(min(speculation.tokens, drafter.max_tokens))]
    return AdaptivePacer(PacingSettings(tuple(buckets_up_to(max_running)), tuple(strategies), seed))


def counts_up_to(tokens: int) -> list[int]:
    """Numbers of tokens worth proposing: each one is a graph of its own, and neighbours differ little where they are large."""
    return sorted({count for count in (1, 2, 3, 5, 7, 11) if count < tokens} | {tokens})


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
