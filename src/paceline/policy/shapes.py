"""Well-known model shapes by name, for measuring and planning without their weights."""

from paceline.policy.config import DecoderConfig, RopeConfig

SHAPES = {
    "smollm2-135m": DecoderConfig(
        "llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, RopeConfig(100000.0), tie_embeddings=True
    ),
    "qwen3-0.6b": DecoderConfig(
        "qwen3",
        151936,
        1024,
        3072,
        28,
        16,
        8,
        128,
        40960,
        1e-6,
        RopeConfig(1e6),
        tie_embeddings=True,
        qk_norm=True,
    ),
    "qwen3-1.7b": DecoderConfig(
        "qwen3",
        151936,
        2048,
        6144,
        28,
        16,
        8,
        128,
        40960,
        1e-6,
        RopeConfig(1e6),
        tie_embeddings=True,
        qk_norm=True,
    ),
    "qwen3-4b": DecoderConfig(
        "qwen3",
        151936,
        2560,
        9728,
        36,
        32,
        8,
        128,
        40960,
        1e-6,
        RopeConfig(1e6),
        tie_embeddings=True,
        qk_norm=True,
    ),
    "qwen3-8b": DecoderConfig(
        "qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 40960, 1e-6, RopeConfig(1e6), qk_norm=True
    ),
    "qwen3-30b-a3b": DecoderConfig(
        "qwen3_moe",
        151936,
        2048,
        6144,
        48,
        32,
        4,
        128,
        40960,
        1e-6,
        RopeConfig(1e6),
        qk_norm=True,
        num_experts=128,
        num_experts_per_token=8,
        expert_intermediate_size=768,
        normalise_expert_weights=True,
    ),
    "qwen3-235b-a22b": DecoderConfig(
        "qwen3_moe",
        151936,
        4096,
        12288,
        94,
        64,
        4,
        128,
        40960,
        1e-6,
        RopeConfig(1e6),
        qk_norm=True,
        num_experts=128,
        num_experts_per_token=8,
        expert_intermediate_size=1536,
        normalise_expert_weights=True,
    ),
    "qwen2.5-7b": DecoderConfig(
        "qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 131072, 1e-6, RopeConfig(1e6), qkv_bias=True
    ),
    "qwen2.5-32b": DecoderConfig(
        "qwen2", 152064, 5120, 27648, 64, 40, 8, 128, 131072, 1e-6, RopeConfig(1e6), qkv_bias=True
    ),
    "llama-3.3-70b": DecoderConfig(
        "llama", 128256, 8192, 28672, 80, 64, 8, 128, 131072, 1e-5, RopeConfig(500000.0)
    ),
    # The sizes of Qwen3's dense models with SmolLM2's vocabulary and no QK-norm: what `paceline models widen`
    # fills, and random weights to compare its cost with. SmolLM2 has 30 layers, so 1.7b has them too and a
    # feed-forward that much smaller (5632 for 6144).
    "1.7b": DecoderConfig(
        "llama", 49152, 2048, 5632, 30, 16, 8, 128, 8192, 1e-5, RopeConfig(100000.0), tie_embeddings=True
    ),
    "4b": DecoderConfig(
        "llama", 49152, 2560, 9728, 36, 32, 8, 128, 8192, 1e-5, RopeConfig(100000.0), tie_embeddings=True
    ),
    "8b": DecoderConfig(
        "llama", 49152, 4096, 12288, 36, 32, 8, 128, 8192, 1e-5, RopeConfig(100000.0), tie_embeddings=True
    ),
    "llama-3.1-8b": DecoderConfig(
        "llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, RopeConfig(500000.0)
    ),
}
