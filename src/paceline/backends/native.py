"""The native engine as a backend, from a recipe. On a GPU the plan sizes the KV pool, on a CPU this file does."""

from tokenizers import Tokenizer

from paceline.backends.drafters import make_drafter
from paceline.config import Config, ConfigError, RolloutConfig
from paceline.engine.engine import Engine, EngineSettings
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.paged.cache import token_bytes
from paceline.plan.lengths import Lengths
from paceline.policy.decoder import Decoder

CPU_BYTES = 4 << 30


def make_native(policy: Decoder, rollout: RolloutConfig, kv_tokens: int, tokenizer: Tokenizer) -> Engine:
    settings = EngineSettings(
        max_running=rollout.max_running,
        kv_tokens=kv_tokens,
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


def cpu_kv_tokens(policy: Decoder, config: Config) -> int:
    """Room for every running request at full length, or what CPU_BYTES hold if that is less; a GPU's pool is planned (`plan/`)."""
    shape, request = policy.config, Lengths.of(config, policy.config).request
    fits = CPU_BYTES // token_bytes(shape.num_layers, shape.num_kv_heads, shape.head_dim, policy.dtype)
    if config.rollout.kv_tokens:
        return config.rollout.kv_tokens
    if fits < request:
        raise ConfigError(f"rollout.kv_tokens: {fits} KV tokens fit the memory, one request may need {request}; lower rollout.max_tokens")
    return min(fits, config.rollout.max_running * request)
