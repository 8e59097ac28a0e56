"""A tiny float64 policy and made-up samples, for comparing an update with formulas."""

import torch

from paceline.config import Config, load_config
from paceline.learning.learner import Learner
from paceline.policy.attention import PackedAttention
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.types import Completion, FinishReason, Group, Request, Sample, SamplingParams, Score, Segment

CONFIG = DecoderConfig("qwen3", 31, 32, 48, 2, 4, 2, 8, 128, qk_norm=True)
MAX_TOKENS = 20


def make_policy(seed: int = 0) -> Decoder:
    return Decoder(CONFIG, torch.float64).initialise(seed)


def make_config(*overrides: str) -> Config:
    return load_config(
        None,
        [
            "rollout.prompts_per_step=2",
            f"rollout.max_tokens={MAX_TOKENS}",
            "learning.max_grad_norm=1e9",
            *overrides,
        ],
    )


def make_groups(seed: int = 0, temperature: float = 0.7, spread: float = 0.3) -> list[Group]:
    """Two prompts with four samples each; one sample has an observation in the middle, outside the loss."""
    g = torch.Generator().manual_seed(seed)
    groups = []
    for p in range(2):
        prompt = tuple(torch.randint(0, 31, (3 + p,), generator=g).tolist())
        samples = []
        for s in range(4):
            length = 2 + 3 * s + p
            tokens = tuple(torch.randint(0, 31, (length,), generator=g).tolist())
            logprobs = tuple((-3.4 + spread * torch.randn(length, generator=g, dtype=torch.float64)).tolist())
            segments = (Segment(0, length, 0),)
            if s == 3:
                segments = (Segment(0, 4, 0), Segment(4, 6, 0, sampled=False), Segment(6, length, 1))
            request = Request(f"{p}/{s}", prompt, s, SamplingParams(temperature=temperature))
            completion = Completion(request, tokens, logprobs, FinishReason.STOP, segments)
            samples.append(Sample(completion, Score(reward=float((s + p) % 3), correct=False)))
        groups.append(Group(str(p), tuple(samples)))
    return groups


def response_logprobs(policy: Decoder, completion: Completion) -> torch.Tensor:
    """One forward pass for one sample, its logprobs token by token."""
    sequence = torch.tensor(completion.request.prompt + completion.tokens)
    attention = PackedAttention([len(sequence)], torch.device("cpu"))
    logits = (
        policy.logits(policy(sequence, attention.positions_T, attention))
        / completion.request.sampling.temperature
    )
    start = len(completion.request.prompt)
    return torch.stack([logits[i - 1].log_softmax(-1)[sequence[i]] for i in range(start, len(sequence))])


def watch_gradients(learner: Learner) -> dict[str, torch.Tensor]:
    """Filled with the gradients that the optimiser is about to use."""
    seen: dict[str, torch.Tensor] = {}
    step = learner.optimiser.step

    def watched(scale: float = 1.0) -> float:
        seen.update(
            {
                name: scale * parameter.grad
                for name, parameter in learner.optimiser.named
                if parameter.grad is not None
            }
        )
        return step(scale)

    learner.optimiser.step = watched
    return seen
