"""Well-known model shapes by name, for measuring and planning without their weights."""

from paceline.policy.config import DecoderConfig, RopeConfig


def _qwen3(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, tie_embeddings: bool = False
) -> DecoderConfig:
    return DecoderConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        max_positions=40960,
        norm_eps=1e-6,
        rope=RopeConfig(1e6),
        tie_embeddings=tie_embeddings,
        qk_norm=True,
    )


def _qwen3_moe(
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    expert_intermediate_size: int,
) -> DecoderConfig:
    return DecoderConfig(
        family="qwen3_moe",
        vocab_size=151936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=4,
        head_dim=128,
        max_positions=40960,
        norm_eps=1e-6,
        rope=RopeConfig(1e6),
        qk_norm=True,
        num_experts=128,
        num_experts_per_token=8,
        expert_intermediate_size=expert_intermediate_size,
        normalise_expert_weights=True,
    )


def _qwen2(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, num_kv_heads: int
) -> DecoderConfig:
    return DecoderConfig(
        family="qwen2",
        vocab_size=152064,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        max_positions=131072,
        norm_eps=1e-6,
        rope=RopeConfig(1e6),
        qkv_bias=True,
    )


def _llama3(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> DecoderConfig:
    return DecoderConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        max_positions=131072,
        norm_eps=1e-5,
        rope=RopeConfig(500000.0),
    )


def _smollm2(
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int = 8,
    head_dim: int = 128,
) -> DecoderConfig:
    return DecoderConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=8192,
        norm_eps=1e-5,
        rope=RopeConfig(100000.0),
        tie_embeddings=True,
    )


# Each family's arguments: hidden size, inner size, layers, heads, and what differs within the family.
SHAPES = {
    "smollm2-135m": _smollm2(576, 1536, 30, 9, num_kv_heads=3, head_dim=64),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tie_embeddings=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tie_embeddings=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tie_embeddings=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-30b-a3b": _qwen3_moe(2048, 6144, 48, 32, expert_intermediate_size=768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 12288, 94, 64, expert_intermediate_size=1536),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, num_kv_heads=4),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, num_kv_heads=8),
    "llama-3.3-70b": _llama3(8192, 28672, 80, 64),
    # The sizes of Qwen3's dense models with SmolLM2's vocabulary and no QK-norm: what `benchmarks/widen.py`
    # fills, and random weights to compare its cost with. SmolLM2 has 30 layers, so 1.7b has them too and a
    # feed-forward that much smaller (5632 for 6144).
    "1.7b": _smollm2(2048, 5632, 30, 16),
    "4b": _smollm2(2560, 9728, 36, 32),
    "8b": _smollm2(4096, 12288, 36, 32),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32),
}
