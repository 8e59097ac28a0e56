"""Small transformers models to compare with, in true double precision."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import transformers

SMALL = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=256,
    head_dim=16,
    bos_token_id=1,
    eos_token_id=2,
)
FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
# Every family; the core suite runs the one with most of what differs between them: norms and experts.
EVERY_FAMILY = [
    pytest.param(family, marks=() if family == "qwen3_moe" else pytest.mark.slow) for family in FAMILIES
]
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True)


def small_model(family: str, **changes) -> transformers.PreTrainedModel:
    torch.manual_seed(sum(map(ord, family)))
    name = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        **{**SMALL, **(EXPERTS if family == "qwen3_moe" else {}), **changes}
    )
    config._attn_implementation = "sdpa"  # eager attention drops to float32 in its softmax
    config._experts_implementation = "eager"  # one expert after the other
    model = getattr(transformers, f"{name}ForCausalLM")(config).double().eval()
    for parameter in model.parameters():  # norms and biases away from their trivial initial values
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


@contextmanager
def double_precision() -> Iterator[None]:
    """transformers' norms and routers drop to float32 even in a float64 model; the oracle must not."""

    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def route(self, x):
        logits = x.reshape(-1, self.hidden_dim) @ self.weight.t()
        weights, experts = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True) if self.norm_topk_prob else weights, experts

    patches = [
        mock.patch(f"transformers.models.{family}.modeling_{family}.{name}RMSNorm.forward", norm)
        for family, name in FAMILIES.items()
    ]
    patches.append(
        mock.patch("transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter.forward", route)
    )
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
