"""The learner's kernel path (what a GPU runs), on a CPU: gradients against plain autograd in float64.

With float64 tensors the kernels' references run, so the differentiable functions themselves are checked to
the last digits; with float32 ones Triton's interpreter runs the kernels.
"""

import random

import pytest
import torch

from paceline.config import LoraConfig
from paceline.kernels import logprob_rows, norm_training, rope_training, swiglu_training
from paceline.learning import head, logprobs
from paceline.learning.batch import MicroBatch, TrainingSequence, pack
from paceline.learning.logprobs import token_logprobs
from paceline.policy import decoder, feed_forward
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.fused import EVERYTHING, Recompute
from paceline.policy.lora import add_adapters, merge_adapters

EXPERTS = dict(
    num_experts=4, num_experts_per_token=2, expert_intermediate_size=24, normalise_expert_weights=True
)
SHAPES = {
    "llama": DecoderConfig("llama", 50, 32, 48, 2, 4, 2, 8, 64, tie_embeddings=True),
    "qwen2": DecoderConfig("qwen2", 50, 32, 48, 2, 4, 4, 8, 64, qkv_bias=True),
    "qwen3": DecoderConfig("qwen3", 50, 24, 40, 2, 4, 2, 12, 64, qk_norm=True),
    "qwen3_moe": DecoderConfig("qwen3_moe", 50, 32, 48, 2, 4, 2, 8, 64, qk_norm=True, **EXPERTS),
}
LORA = LoraConfig(rank=4, alpha=8, targets=["q_proj", "v_proj", "o_proj"])
CASES = [(family, None) for family in SHAPES] + [("qwen3", LORA), ("qwen3_moe", LORA)]
# The quick ones between them have every kind of layer; the others run in the full suite.
QUICK = [("qwen3_moe", LORA), ("qwen3", None)]
MARKED_CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
KEPT = {
    "kept": Recompute(between=False),
    "between": Recompute(),
    "one layer": Recompute(layers=1),
    "everything": EVERYTHING,
}


def make_policy(family: str, lora: LoraConfig | None, dtype: torch.dtype) -> Decoder:
    policy = Decoder(SHAPES[family]).initialise(0).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.parameters():
        if parameter.ndim == 1:  # norms of ones would hide a wrong gradient
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(dtype))
    if lora is not None:
        add_adapters(policy, lora, seed=0)
        for name, parameter in policy.named_parameters():
            if name.endswith(".B"):
                parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        merge_adapters(policy)
    return policy


def make_batch() -> MicroBatch:
    rng = random.Random(0)
    sequences = []
    for prompt, response, temperature in ((3, 9, 0.8), (7, 1, 1.0), (1, 14, 1.3)):
        tokens = tuple(rng.randrange(50) for _ in range(prompt + response))
        sequences.append(
            TrainingSequence(tokens, prompt, (True,) * response, (0.0,) * response, 1.0, temperature)
        )
    return pack(sequences, torch.device("cpu"))


def results(policy: Decoder) -> dict[str, torch.Tensor]:
    batch = make_batch()
    logprobs_R, entropies_R = token_logprobs(policy, batch)
    weights_R = torch.randn(len(logprobs_R), generator=torch.Generator().manual_seed(2)).to(logprobs_R.dtype)
    (logprobs_R * weights_R).sum().backward()
    found = {name: p.grad.double() for name, p in policy.named_parameters() if p.grad is not None}
    return found | {"logprobs": logprobs_R.detach().double(), "entropies": entropies_R.double()}


@pytest.fixture
def kernel_path(monkeypatch):
    """Takes the GPU's path on the CPU, but for the flash kernel."""

    def switch_on(interpreted: bool) -> None:
        for module in (decoder, feed_forward, logprobs):
            monkeypatch.setattr(module, "takes_kernels", lambda x: True)
        monkeypatch.setattr(head, "CHUNK_ELEMENTS", 10 * 50)
        if interpreted:
            for module, names in (
                (norm_training, ("rms_norm_backward",)),
                (rope_training, ("rotate_qk", "rotate_qk_backward")),
                (swiglu_training, ("silu_multiply_backward",)),
                (logprob_rows, ("logprob_rows",)),
            ):
                for name in names:
                    monkeypatch.setattr(module, f"{name}_reference", getattr(module, f"{name}_triton"))

    return switch_on


def assert_close(ours: dict[str, torch.Tensor], oracle: dict[str, torch.Tensor], limit: float) -> None:
    assert ours.keys() == oracle.keys()
    for name, expected in oracle.items():
        scale = max(1e-3, float(expected.abs().max()))
        assert float((ours[name] - expected).abs().max()) < limit * scale, name


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("family, lora", MARKED_CASES)
def test_kernel_path_gradients_equal_autograd_in_float64(family, lora, kept, kernel_path):
    oracle = results(make_policy(family, lora, torch.float64))
    kernel_path(interpreted=False)
    policy = make_policy(family, lora, torch.float64)
    policy.recompute = KEPT[kept]
    assert_close(results(policy), oracle, 1e-9)


@pytest.mark.parametrize(
    "family, lora",
    [
        pytest.param("qwen3", None, marks=pytest.mark.slow),
        pytest.param("llama", LORA, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", None, marks=pytest.mark.slow),
    ],
)
def test_interpreted_kernel_gradients_are_near_autograd(family, lora, kernel_path):
    oracle = results(make_policy(family, lora, torch.float64))
    kernel_path(interpreted=True)
    assert_close(results(make_policy(family, lora, torch.float32)), oracle, 2e-5)
