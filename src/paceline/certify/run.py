"""One certification, from the subject to the verdict."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.certify.certificate import Certificate, Check
from paceline.certify.checks import check_equality, check_frequencies, check_parity, describe, mixed_requests
from paceline.certify.subject import Subject
from paceline.policy.attention import PackedAttention
from paceline.policy.decoder import Decoder
from paceline.types import Completion, SamplingParams


@dataclass(frozen=True)
class Plan:
    """How much is sampled: completions of `max_tokens` for each of `contexts` contexts, `samples` at temperature 1 and `fewer` otherwise."""

    contexts: int = 2
    samples: int = 3000
    fewer: int = 250
    further: tuple[SamplingParams, ...] = (
        SamplingParams(0.7), SamplingParams(1.5), SamplingParams(1.0, top_k=5), SamplingParams(1.2, top_p=0.9), SamplingParams(0.0),
    )  # fmt: skip
    mixed: int = 36  # completions for equality and parity
    mixed_tokens: int = 32
    seed: int = 0


QUICK = Plan(samples=300, fewer=100, further=(SamplingParams(1.5, top_k=5),), mixed=12)


def certify(
    subject: Subject, prompts: Sequence[tuple[int, ...]], plan: Plan, settings: dict[str, str], say: Callable[[str], None] = lambda _: None
) -> Certificate:
    start = time.perf_counter()
    requests = mixed_requests(prompts, plan.mixed, plan.mixed_tokens, plan.seed)
    plain = subject.open(0, 64).run(requests)
    checks: list[Check] = []
    say("same bits")
    checks += check_equality(subject, requests, plain)
    opened = subject.open(subject.tokens, 256)
    say("logprobs")
    checks.append(check_parity(subject.policy, plain, "logprobs of a learner, plain"))
    if subject.tokens:
        checks.append(check_parity(subject.policy, opened.run(requests), "logprobs of a learner, speculating"))
    contexts = contested_contexts(subject.exact_policy, plain, plan.contexts)
    for kind in (SamplingParams(1.0), *plan.further):
        say(f"frequencies, {describe(kind)}")
        sampling = replace(kind, max_tokens=subject.tokens + 1 if subject.tokens else 4, ignore_eos=True)
        samples = plan.samples if kind == SamplingParams(1.0) else plan.fewer if kind.temperature else 10
        checks += check_frequencies(subject, opened, contexts, samples, sampling, plan.seed)
    return Certificate.of(subject.name, settings, checks, time.perf_counter() - start)


@torch.inference_mode()
def contested_contexts(policy: Decoder, completions: Sequence[Completion], count: int) -> list[tuple[int, ...]]:
    """Beginnings of texts after which the policy is least sure: one per prompt, and there sampling has most to get wrong."""
    found: dict[tuple[int, ...], tuple[float, tuple[int, ...]]] = {}
    for completion in completions:
        prompt, text = completion.request.prompt, completion.request.prompt + completion.tokens
        packed = PackedAttention([len(text)], policy.device)
        logprobs_TV = policy.logits(policy(torch.tensor(text, device=policy.device), packed.positions_T, packed)).log_softmax(-1)
        entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)[len(prompt) - 1 :]
        best = int(entropy_T.argmax())
        found[prompt] = max(found.get(prompt, (-1.0, prompt)), (float(entropy_T[best]), text[: len(prompt) + best]))
    return [context for _, context in sorted(found.values(), reverse=True)[:count]]
