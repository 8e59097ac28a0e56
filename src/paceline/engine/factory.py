"""The native engine as a backend, from a recipe. On a GPU the plan sizes the KV pool, on a CPU this file
does.
"""

from pathlib import Path

from tokenizers import Tokenizer

from paceline.config import Config, ConfigError, RolloutConfig, SpeculationConfig
from paceline.drafting.base import Drafter
from paceline.drafting.factory import make_drafter
from paceline.drafting.recipe import available_drafters
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.graphs import buckets_up_to
from paceline.engine.lengths import Lengths, pool_too_small
from paceline.kernels.fp8_format import E4M3
from paceline.pacing.adaptive import AdaptivePacer, PacingSettings
from paceline.pacing.strategy import FixedPacer, Pacer, Strategy
from paceline.paged.cache import token_bytes
from paceline.policy.config import DecoderConfig, read_config
from paceline.policy.decoder import Decoder

CPU_BYTES = 4 << 30


def make_native(
    policy: Decoder,
    rollout: RolloutConfig,
    kv_tokens: int,
    tokenizer: Tokenizer,
    seed: int = 0,
    widened_from: Path | None = None,
    request_tokens: int = 0,
) -> Engine:
    if rollout.router_replay and not policy.config.expert_layers:
        raise ConfigError(
            "rollout.router_replay = True: this policy has no experts, hence no routing to replay; leave it out, or use one with experts"
        )
    settings = EngineSettings(
        max_running=rollout.max_running,
        kv_tokens=kv_tokens,
        request_tokens=request_tokens,
        prefill_tokens=rollout.prefill_tokens,
        admission=rollout.admission,
        deterministic=rollout.deterministic,
        precision=rollout.precision,
        base_precision_layers=rollout.base_precision_layers,
        kv_scales_per_head=rollout.kv_scales == "head",
        verify=rollout.speculation.verify,
        graph_memory=int(rollout.graph_memory_gb * 1e9),
        max_proposal=rollout.speculation.tokens,
        records_routing=rollout.router_replay,
    )
    speculation = rollout.speculation
    shape = policy.config if widened_from is None else read_config(widened_from)
    drafters = [
        make_drafter(name, policy, speculation, widened_from, tokenizer)
        for name in available_drafters(speculation, shape)
    ]
    pacer = make_pacer(speculation, drafters, rollout.max_running, seed, policy.config) if drafters else None
    return Engine(policy, settings, tokenizer, drafters, pacer)


def make_pacer(
    speculation: SpeculationConfig, drafters: list[Drafter], max_running: int, seed: int, shape: DecoderConfig
) -> Pacer:
    """`shape`: the policy's."""
    if speculation.pacing == "fixed":
        return FixedPacer(
            Strategy(drafters[0].name, min(speculation.tokens, drafters[0].max_tokens)),
            speculation.max_running or max_running,
        )
    strategies = [
        Strategy(drafter.name, count)
        for drafter in drafters
        for count in counts_up_to(min(speculation.tokens, drafter.max_tokens))
    ]
    catch_up = {
        d.name: d.shape.num_parameters / shape.num_parameters
        for d in drafters
        if d.needs_catch_up and d.shape is not None
    }
    return AdaptivePacer(
        PacingSettings(tuple(buckets_up_to(max_running)), tuple(strategies), seed, catch_up=catch_up)
    )


def counts_up_to(tokens: int) -> list[int]:
    """Numbers of tokens worth proposing: each one is a graph of its own, and neighbours differ little where
    they are large.
    """
    return sorted({count for count in (1, 2, 3, 5, 7, 11) if count < tokens} | {tokens})


def cpu_kv_tokens(policy: Decoder, config: Config) -> int:
    """Room for every running request at full length, or what CPU_BYTES hold if that is less; a GPU's pool is
    planned (`plan/`).
    """
    shape, lengths = policy.config, Lengths.of(config, policy.config)
    request = lengths.request
    dtype = E4M3 if config.rollout.precision == "fp8+kv" else policy.dtype
    fits = CPU_BYTES // token_bytes(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)
    if config.rollout.kv_tokens:
        if problem := pool_too_small(config.rollout.kv_tokens, lengths):
            raise ConfigError(problem)
        return config.rollout.kv_tokens
    if fits < request:
        raise ConfigError(
            f"rollout.kv_tokens: {fits} KV tokens fit the memory, one request may need {request}; lower rollout.max_tokens"
        )
    return min(fits, config.rollout.max_running * request)
