"""The native engine from a recipe. On a GPU the plan sizes the KV pool, on a CPU this file does."""

import os

from tokenizers import Tokenizer

from paceline.config import Config, ConfigError, RolloutConfig, SpeculationConfig
from paceline.drafting.base import Drafter
from paceline.drafting.factory import make_drafters
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.graphs import buckets_up_to
from paceline.engine.lengths import Lengths, pool_too_small
from paceline.kernels.fp8_format import E4M3
from paceline.pacing.adaptive import AdaptivePacer, PacingSettings
from paceline.pacing.strategy import FixedPacer, Pacer, Strategy
from paceline.paged.cache import token_bytes
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder

START_SECONDS = 1.0  # for timing steps, where a pacer has no times yet
CPU_KV_BYTES = 4 << 30  # the largest KV pool of a CPU run unless the recipe sizes it


def make_engine(
    policy: Decoder,
    rollout: RolloutConfig,
    kv_tokens: int,
    tokenizer: Tokenizer | None,
    seed: int = 0,
    request_tokens: int = 0,
    keeps_prefixes: bool = False,
) -> Engine:
    if rollout.router_replay and not policy.config.expert_layers:
        raise ConfigError(
            "rollout.router_replay = True: this policy has no experts, hence no routing to replay; "
            "leave it out, or use one with experts"
        )
    speculation = rollout.speculation
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
        verify=speculation.verify,
        graph_memory=int(rollout.graph_memory_gb * 1e9),
        max_proposal=speculation.tokens,
        keeps_prefixes=keeps_prefixes,
        keeps_cache=rollout.on_update == "keep",
        trees=speculation.shape == "tree",
        start_seconds=START_SECONDS,
        records_routing=rollout.router_replay,
    )
    made = make_drafters(speculation, policy, tokenizer)
    pacer = make_pacer(speculation, made, rollout.max_running, seed, policy.config) if made else None
    return Engine(policy, settings, tokenizer, made, pacer)


def make_pacer(
    speculation: SpeculationConfig,
    drafters: list[Drafter],
    max_running: int,
    seed: int,
    shape: DecoderConfig,
) -> Pacer:
    """Returns the recipe's pacer; `shape` is the policy's."""
    tree = speculation.shape == "tree"
    if speculation.pacing == "fixed":
        tokens = min(speculation.tokens, drafters[0].max_tokens)
        return FixedPacer(Strategy(drafters[0].name, tokens, tree), speculation.max_running or max_running)
    strategies = []
    for drafter in drafters:
        tokens = min(speculation.tokens, drafter.max_tokens)
        strategies += [Strategy(drafter.name, count, tree) for count in counts_up_to(tokens)]
    # Drafters that follow the policy have its states, and catch up on all waiting tokens at once.
    catch_up = {
        d.name: d.shape.num_parameters / shape.num_parameters
        for d in drafters
        if d.needs_catch_up and d.shape is not None and not d.captured_layers
    }
    return AdaptivePacer(
        PacingSettings(tuple(buckets_up_to(max_running)), tuple(strategies), seed, catch_up=catch_up)
    )


def counts_up_to(tokens: int) -> list[int]:
    """Returns the proposal lengths worth having a graph for: large neighbours differ little."""
    return sorted({count for count in (1, 2, 3, 5, 7, 11) if count < tokens} | {tokens})


def cpu_kv_tokens(policy: Decoder, config: Config) -> int:
    """Returns the KV pool of a CPU run: every running request at full length, or what CPU_KV_BYTES hold."""
    shape, lengths = policy.config, Lengths.of(config, policy.config)
    request = lengths.request
    dtype = E4M3 if config.rollout.precision.fp8_kv else policy.dtype
    size = token_bytes(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)
    fits = CPU_KV_BYTES // size
    if asked := config.rollout.kv_tokens:
        if problem := pool_too_small(asked, lengths):
            raise ConfigError(problem)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if asked * size > memory:
            raise ConfigError(
                f"rollout.kv_tokens = {asked}: takes {asked * size / 1e9:.1f} GB, this machine has "
                f"{memory / 1e9:.1f} GB; lower it, or leave it out"
            )
        return asked
    if fits < request:
        raise ConfigError(
            f"rollout.kv_tokens: {fits} KV tokens fit the memory, one request may need {request}; lower "
            "rollout.max_tokens"
        )
    return min(fits, config.rollout.max_running * request)
