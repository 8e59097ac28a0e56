"""Small shapes of every family, with what distinguishes them: biases, QK-norm, experts, tied embeddings,
grouped heads.
"""

from paceline.policy.config import DecoderConfig

SMALL_SHAPES = {
    "llama": DecoderConfig("llama", 500, 64, 160, 3, 4, 2, 16, 256, tie_embeddings=True),
    "llama-biases": DecoderConfig(
        "llama", 500, 64, 160, 2, 4, 4, 16, 256, qkv_bias=True, output_bias=True, mlp_bias=True
    ),
    "qwen2": DecoderConfig("qwen2", 500, 64, 160, 3, 4, 2, 16, 256, qkv_bias=True),
    "qwen3": DecoderConfig("qwen3", 500, 64, 160, 3, 8, 2, 16, 256, qk_norm=True),
    "qwen3_moe": DecoderConfig(
        "qwen3_moe",
        500,
        64,
        160,
        3,
        4,
        2,
        16,
        256,
        qk_norm=True,
        num_experts=8,
        num_experts_per_token=2,
        expert_intermediate_size=48,
        normalise_expert_weights=True,
        dense_layers=(1,),
    ),
}
